// A device with an ESP32 (Arduino core 3) and the library "MQTT" 2.5 of Joël Gähwiler: sends a reading each second, ends at
// the command `stop`. The wide-spread PubSubClient publishes at QoS 0 only.
#include <MQTT.h>
#include <WiFi.h>
#include <time.h>

const char WIFI[] = "", WIFI_PASSWORD[] = "";
const char HOST[] = "192.168.1.10", NAME[] = "device-1", PASSWORD[] = "";
const int PORT = 1883;

// TLS: NetworkClientSecure of <NetworkClientSecure.h>, network.setCACert(pem) in setup(), PORT 8883, and the clock set before.
WiFiClient network;
MQTTClient client(256);  // bytes of the longest packet
bool stopped = false;

void onMessage(String &topic, String &payload) {
  Serial.println("command: " + topic + " " + payload);
  stopped = stopped || payload == "stop";
}

bool connectOnce() {
  if (!client.connect(NAME, NAME, PASSWORD)) {
    Serial.println("not connected: " + String((int)client.lastError()) + " " + String((int)client.returnCode()));
    return false;
  }
  Serial.println("connected, session present: " + String((int)client.sessionPresent()));
  return client.sessionPresent() || client.subscribe(String("commands/") + NAME + "/#", 1);
}

String measure() {
  char text[64];
  time_t now = time(nullptr);
  strftime(text, sizeof text, "{\"ts\": \"%Y-%m-%dT%H:%M:%SZ\", \"value\": 21.5}", gmtime(&now));
  return text;
}

void setup() {
  Serial.begin(115200);
  WiFi.begin(WIFI, WIFI_PASSWORD);  // joins again by itself
  while (WiFi.status() != WL_CONNECTED) delay(100);
  configTime(0, 0, "pool.ntp.org");
  client.begin(HOST, PORT, network);
  client.setOptions(30, false, 10000);  // keep alive in s, no clean session, timeout in ms
  client.onMessage(onMessage);
}

void loop() {
  static String reading;
  static unsigned long measured = 0;
  delay(10);
  if (stopped) {
    if (client.connected()) client.disconnect();
    return;
  }
  if (!client.connected() && !connectOnce()) {
    delay(1000);
    return;
  }
  client.loop();  // receives commands
  if (reading == "" && millis() - measured >= 1000) {
    measured = millis();
    reading = measure();
  }
  // True with the acknowledgement. After an error the client is not connected, and the reading is sent again.
  if (reading != "" && client.publish(String("sensors/") + NAME + "/temperature", reading, false, 1)) {
    Serial.println("stored: " + reading);
    reading = "";
  }
}
