// A device in JavaScript (Node.js) with MQTT.js 5: sends a reading each second, ends at the command `stop`.
"use strict";

const fs = require("fs");
const mqtt = require("mqtt");

const { MQTT_HOST = "127.0.0.1", MQTT_PORT = "1883", MQTT_USER: name = "device-1", MQTT_PASSWORD, MQTT_CA } = process.env;
const client = mqtt.connect({
  protocol: MQTT_CA ? "mqtts" : "mqtt", // mqtts: TLS, usually on port 8883
  ca: MQTT_CA && fs.readFileSync(MQTT_CA),
  host: MQTT_HOST,
  port: Number(MQTT_PORT),
  username: name,
  password: MQTT_PASSWORD,
  clientId: name,
  protocolVersion: 5,
  clean: false,
  properties: { sessionExpiryInterval: 24 * 60 * 60 }, // s: the broker keeps commands as long
  keepalive: 30,
});
let timer;

async function measure() {
  const reading = JSON.stringify({ ts: new Date().toISOString(), value: 21.5 });
  try {
    // Until the acknowledgement; after a reconnect MQTT.js sends it again.
    await client.publishAsync(`sensors/${name}/temperature`, reading, { qos: 1 });
    console.log("stored:", reading);
  } catch (error) {
    console.error("refused:", error.message);
  }
  if (!client.disconnecting) timer = setTimeout(measure, 1000);
}

client.on("error", (error) => console.error("not connected:", error.message));
client.on("connect", (connack) => {
  console.log("connected, session present:", connack.sessionPresent);
  if (!connack.sessionPresent) client.subscribe(`commands/${name}/#`, { qos: 1 });
});
client.once("connect", measure);
client.on("message", (topic, payload) => {
  console.log("command:", topic, payload.toString());
  if (payload.toString() !== "stop") return;
  clearTimeout(timer);
  setImmediate(() => client.end()); // behind the acknowledgement of this command
});
