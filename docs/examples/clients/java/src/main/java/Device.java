// A device in Java 17 with the HiveMQ MQTT Client 1.3: sends a reading each second, ends at the command `stop`.

import static java.nio.charset.StandardCharsets.UTF_8;

import com.hivemq.client.mqtt.MqttGlobalPublishFilter;
import com.hivemq.client.mqtt.datatypes.MqttQos;
import com.hivemq.client.mqtt.mqtt5.Mqtt5Client;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5PubAckException;
import java.io.FileInputStream;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.time.Instant;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import javax.net.ssl.TrustManagerFactory;

public class Device {
    public static void main(String[] arguments) throws Exception {
        var environment = System.getenv();
        var name = environment.getOrDefault("MQTT_USER", "device-1");
        var stop = new CountDownLatch(1);
        var builder = Mqtt5Client.builder()
            .identifier(name)
            .serverHost(environment.getOrDefault("MQTT_HOST", "127.0.0.1"))
            .serverPort(Integer.parseInt(environment.getOrDefault("MQTT_PORT", "1883")))
            .simpleAuth().username(name).password(environment.getOrDefault("MQTT_PASSWORD", "").getBytes(UTF_8)).applySimpleAuth()
            .automaticReconnectWithDefaultConfig()
            .addConnectedListener(context -> System.out.println("connected"))
            .addDisconnectedListener(context -> System.out.println("not connected: " + context.getCause()));
        if (environment.containsKey("MQTT_CA")) {  // TLS, usually on port 8883
            builder = builder.sslConfig().trustManagerFactory(trusted(environment.get("MQTT_CA"))).applySslConfig();
        }
        var client = builder.buildAsync();
        client.publishes(MqttGlobalPublishFilter.ALL, message -> {  // before the connect, which may bring kept commands
            var payload = new String(message.getPayloadAsBytes(), UTF_8);
            System.out.println("command: " + message.getTopic() + " " + payload);
            message.acknowledge();  // it is done: the broker need not send it again
            if (payload.equals("stop")) {
                stop.countDown();
            }
        }, true);
        // s: the broker keeps commands as long
        client.connectWith().cleanStart(false).sessionExpiryInterval(24 * 60 * 60).keepAlive(30).send().join();
        client.subscribeWith().topicFilter("commands/" + name + "/#").qos(MqttQos.AT_LEAST_ONCE).send().join();
        boolean stopping;
        do {
            stopping = stop.await(1, TimeUnit.SECONDS);  // one more reading follows: then the acknowledgement has been sent
            var reading = "{\"ts\": \"%s\", \"value\": 21.5}".formatted(Instant.now());
            try {
                // join() waits for the acknowledgement; after a reconnect the client sends the message again.
                client.publishWith().topic("sensors/" + name + "/temperature").qos(MqttQos.AT_LEAST_ONCE)
                    .payload(reading.getBytes(UTF_8)).send().join();
                System.out.println("stored: " + reading);
            } catch (CompletionException error) {
                if (!(error.getCause() instanceof Mqtt5PubAckException refusal)) {
                    throw error;
                }
                System.out.println("refused, " + refusal.getMqttMessage().getReasonCode() + ": " + reading);
            }
        } while (!stopping);
        client.disconnect().join();
        System.exit(0);  // a thread of the client waits for the end of the session
    }

    /** Trusts the authorities of a PEM file. */
    private static TrustManagerFactory trusted(String file) throws Exception {
        var keys = KeyStore.getInstance(KeyStore.getDefaultType());
        keys.load(null, null);
        try (var stream = new FileInputStream(file)) {
            for (var certificate : CertificateFactory.getInstance("X.509").generateCertificates(stream)) {
                keys.setCertificateEntry("authority-" + keys.size(), certificate);
            }
        }
        var factory = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        factory.init(keys);
        return factory;
    }
}
