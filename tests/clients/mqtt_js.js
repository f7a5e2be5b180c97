// Bursts of MQTT.js: COUNT retained messages without a wait, at each QoS, in both versions, to each URL of the arguments.
// Writes a line of JSON for each test. NODE_PATH names the directory where npm put `mqtt`.
"use strict";

const mqtt = require("mqtt");

const COUNT = 5000;
const SECONDS = 60;

function burst(url, version, qos) {
  return new Promise((resolve) => {
    const client = mqtt.connect(url, { protocolVersion: version, reconnectPeriod: 0, rejectUnauthorized: false });
    let done = 0;
    let detail = "";
    const timer = setTimeout(() => {
      detail = detail || `no answer in ${SECONDS} s`;
      client.end(true);
    }, SECONDS * 1000);
    client.stream.setMaxListeners(0);
    client.on("disconnect", (packet) => (detail = `DISCONNECT ${packet.reasonCode}`));
    client.on("error", (error) => (detail = detail || error.message));
    client.on("close", () => {
      clearTimeout(timer);
      resolve(done === COUNT ? "" : `${done} of ${COUNT} acknowledged: ${detail || "closed"}`);
    });
    client.on("connect", () => {
      for (let n = 0; n < COUNT; n += 1) {
        client.publish(`burst/${version}/${qos}/${n}`, "x".repeat(40), { qos, retain: true }, (error) => {
          if (error) return;
          done += 1;
          if (done === COUNT) client.end();
        });
      }
    });
  });
}

async function main() {
  for (const url of process.argv.slice(2)) {
    for (const version of [4, 5]) {
      for (const qos of [0, 1, 2]) {
        const detail = await burst(url, version, qos);
        const test = `burst ${url.split(":")[0]} ${version === 5 ? "5.0" : "3.1.1"} QoS ${qos}`;
        process.stdout.write(JSON.stringify({ test, outcome: detail ? "failed" : "passed", detail }) + "\n");
      }
    }
  }
}

main();
