# A device in MicroPython (ESP32) with umqtt.simple: sends a reading each second, ends at the command `stop`.
# mpremote mip install umqtt.simple, then mpremote cp device.py :main.py
import json
import time

from umqtt.simple import MQTTClient

WIFI, WIFI_PASSWORD = "", ""
HOST, PORT, NAME, PASSWORD = "192.168.1.10", 1883, "device-1", ""
CA = ""  # a certificate in DER (openssl x509 -outform der): TLS, usually on port 8883; HOST is a name then, not an address
KEEP_ALIVE, TIMEOUT = 30, 10  # s
stopped = False


def on_message(topic, payload):
    global stopped
    print("command:", topic.decode(), payload.decode())
    stopped = stopped or payload == b"stop"


def join_wifi():
    import network

    station = network.WLAN(network.STA_IF)
    station.active(True)
    station.connect(WIFI, WIFI_PASSWORD)  # the ESP32 joins again by itself
    while not station.isconnected():
        time.sleep(0.1)


def measure():
    now = time.gmtime()  # ntptime.settime() sets the clock
    return json.dumps({"ts": "%04d-%02d-%02dT%02d:%02d:%02dZ" % now[:6], "value": 21.5})


def trust(file):
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=file)
    return context


def connect(client):
    present = client.connect(clean_session=False, timeout=TIMEOUT)
    print("connected, session present:", present)
    if not present:
        client.subscribe("commands/%s/#" % NAME, 1)


def main():
    if WIFI:
        join_wifi()
    client = MQTTClient(NAME, HOST, PORT, NAME, PASSWORD, KEEP_ALIVE, ssl=trust(CA) if CA else None)
    client.set_callback(on_message)
    connected, reading = False, None
    while not stopped:  # machine.WDT restarts a board whose connection hangs nevertheless
        try:
            if not connected:
                connect(client)
                connected = True
            reading = reading or measure()
            client.pid %= 65535  # umqtt.simple would count on beyond the last packet identifier
            if hasattr(client.sock, "settimeout"):  # not with TLS
                client.sock.settimeout(TIMEOUT)
            client.publish("sensors/%s/temperature" % NAME, reading, qos=1)  # returns with the acknowledgement
            print("stored:", reading)
            reading = None
            while client.check_msg() is not None:
                pass
        except OSError as error:
            print("not connected:", error)  # the next turn connects, and sends the reading again
            connected = False
        time.sleep(1)
    client.disconnect()


main()
