"""A device in Python with paho-mqtt 2: sends a reading each second, ends at the command `stop`."""

import json
import os
import queue
import threading
import time

import paho.mqtt.client as mqtt

NAME = os.environ.get("MQTT_USER", "device-1")
acknowledged, stop = queue.SimpleQueue(), threading.Event()


def on_connect(client, _userdata, flags, reason, _properties):
    print("not connected:" if reason.is_failure else "connected:", reason, flush=True)
    if not reason.is_failure and not flags.session_present:
        client.subscribe(f"commands/{NAME}/#", qos=1)


def on_message(client, _userdata, message):
    print("command:", message.topic, message.payload.decode(), flush=True)
    client.ack(message.mid, message.qos)  # it is done: the broker need not send it again
    if message.payload == b"stop":
        stop.set()


client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id=NAME, protocol=mqtt.MQTTv5, manual_ack=True)
client.username_pw_set(NAME, os.environ.get("MQTT_PASSWORD"))
client.on_connect, client.on_message = on_connect, on_message
client.on_publish = lambda _client, _userdata, _mid, reason, _properties: acknowledged.put(reason)
if "MQTT_CA" in os.environ:  # TLS, usually on port 8883
    client.tls_set(os.environ["MQTT_CA"])
session = mqtt.Properties(mqtt.PacketTypes.CONNECT)
session.SessionExpiryInterval = 24 * 60 * 60  # s: the broker keeps commands as long
host, port = os.environ.get("MQTT_HOST", "127.0.0.1"), int(os.environ.get("MQTT_PORT", "1883"))
client.connect_async(host, port, keepalive=30, clean_start=False, properties=session)
client.loop_start()  # connects in a thread of its own, and again whenever the connection is lost
try:
    while not stop.wait(1):
        reading = json.dumps({"ts": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "value": 21.5})
        client.publish(f"sensors/{NAME}/temperature", reading, qos=1)
        reason = acknowledged.get()  # waits; after a reconnect paho sends the message again
        print(f"refused, {reason}:" if reason.is_failure else "stored:", reading, flush=True)
finally:
    client.disconnect()
    client.loop_stop()
