//! A device in Rust with rumqttc 0.25: sends a reading each second, ends at the command `stop`.

use rumqttc::v5::mqttbytes::v5::{Packet, PubAckReason};
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::{Client, Event, MqttOptions};
use rumqttc::{Outgoing, TlsConfiguration, Transport};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{env, error::Error, fs, thread};

fn setting(name: &str, default: &str) -> String {
    env::var(name).unwrap_or_else(|_| default.to_string())
}

/// Sends readings until something arrives on `stop`.
fn measure(client: Client, topic: String, acknowledged: mpsc::Receiver<PubAckReason>, stop: mpsc::Receiver<()>) {
    while let Err(RecvTimeoutError::Timeout) = stop.recv_timeout(Duration::from_secs(1)) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let reading = serde_json::json!({"ts": now.as_millis() as u64, "value": 21.5}).to_string();
        client.publish(&topic, QoS::AtLeastOnce, false, reading.clone()).unwrap();
        // Until the acknowledgement; after a reconnect rumqttc sends it again.
        match acknowledged.recv().unwrap() {
            PubAckReason::Success | PubAckReason::NoMatchingSubscribers => println!("stored: {reading}"),
            reason => println!("refused, {reason:?}: {reading}"),
        }
    }
    client.disconnect().unwrap();
}

fn main() -> Result<(), Box<dyn Error>> {
    let name = setting("MQTT_USER", "device-1");
    let port = setting("MQTT_PORT", "1883").parse()?;
    let mut options = MqttOptions::new(&name, setting("MQTT_HOST", "127.0.0.1"), port);
    options.set_credentials(&name, setting("MQTT_PASSWORD", ""));
    options.set_keep_alive(Duration::from_secs(30));
    options.set_clean_start(false);
    options.set_session_expiry_interval(Some(24 * 60 * 60)); // s: the broker keeps commands as long
    if let Ok(file) = env::var("MQTT_CA") {
        // TLS, usually on port 8883
        options.set_transport(Transport::Tls(TlsConfiguration::Simple { ca: fs::read(file)?, alpn: None, client_auth: None }));
    }
    let (client, mut connection) = Client::new(options, 10);
    let (answer, acknowledged) = mpsc::channel();
    let (ended, stop) = mpsc::channel();
    let (publisher, topic) = (client.clone(), format!("sensors/{name}/temperature"));
    let readings = thread::spawn(move || measure(publisher, topic, acknowledged, stop));
    for event in connection.iter() {
        match event {
            Ok(Event::Incoming(Packet::ConnAck(connack))) => {
                println!("connected, session present: {}", connack.session_present);
                if !connack.session_present {
                    client.try_subscribe(format!("commands/{name}/#"), QoS::AtLeastOnce)?;
                }
            }
            Ok(Event::Incoming(Packet::Publish(message))) => {
                let payload = String::from_utf8_lossy(&message.payload);
                println!("command: {} {payload}", String::from_utf8_lossy(&message.topic));
                if payload == "stop" {
                    ended.send(())?;
                }
            }
            Ok(Event::Incoming(Packet::PubAck(ack))) => answer.send(ack.reason)?,
            Ok(Event::Outgoing(Outgoing::Disconnect)) => break,
            Ok(_) => {}
            Err(error) => {
                println!("not connected: {error}");
                thread::sleep(Duration::from_secs(1)); // the next iteration connects again
            }
        }
    }
    readings.join().map_err(|_| "the thread of the readings failed")?;
    Ok(())
}
