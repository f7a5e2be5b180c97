// MQTT.js behind the line protocol of client.py's Program. NODE_PATH names the directory where npm put `mqtt`.
"use strict";

const readline = require("readline");
const mqtt = require("mqtt");

let client;

function say(word, fields) {
  const parts = fields.map(([name, value]) => `${name}=${value}`);
  process.stdout.write([word, ...parts].join("\t") + "\n");
}

function fail(error) {
  say("error", [["text", error.message]]);
}

function users(properties) {
  const pairs = [];
  for (const [name, value] of Object.entries(properties.userProperties || {})) {
    for (const one of [].concat(value)) pairs.push(["user", `${name}=${one}`]);
  }
  return pairs;
}

function onMessage(topic, payload, packet) {
  const properties = packet.properties || {};
  const fields = [["topic", topic], ["payload", payload], ["qos", packet.qos], ["retain", Number(packet.retain)]];
  fields.push(...users(properties));
  for (const one of [].concat(properties.subscriptionIdentifier || [])) fields.push(["identifier", one]);
  const optional = [
    ["response", properties.responseTopic],
    ["correlation", properties.correlationData],
    ["type", properties.contentType],
    ["expiry", properties.messageExpiryInterval],
  ];
  say("message", fields.concat(optional.filter(([, value]) => value !== undefined)));
}

function connect(fields) {
  const options = {
    clientId: fields.id,
    protocolVersion: Number(fields.version),
    clean: fields.clean === "1",
    reconnectPeriod: 0,
  };
  if (fields.version === "5") options.properties = { sessionExpiryInterval: Number(fields.expiry) };
  if (fields.will) options.will = { topic: fields.will, payload: fields.payload, qos: Number(fields.qos) };
  client = mqtt.connect(fields.url, options);
  client.on("message", onMessage);
  client.on("error", fail);
  client.on("disconnect", (packet) => fail(new Error(`DISCONNECT ${packet.reasonCode}`)));
  client.on("connect", (packet) => say("connected", [["session", Number(packet.sessionPresent)]]));
}

function subscribe(fields) {
  const options = { qos: Number(fields.qos) };
  if (fields.identifier) options.properties = { subscriptionIdentifier: Number(fields.identifier) };
  client.subscribe(fields.filter, options, (error, granted) =>
    error ? fail(error) : say("subscribed", [["code", granted[0].qos]]),
  );
}

function publish(fields, user) {
  const properties = {};
  if (user.length) {
    properties.userProperties = {};
    for (const [name, value] of user) (properties.userProperties[name] ||= []).push(value);
  }
  if (fields.response) properties.responseTopic = fields.response;
  if (fields.correlation) properties.correlationData = Buffer.from(fields.correlation);
  if (fields.type) properties.contentType = fields.type;
  if (fields.expiry) properties.messageExpiryInterval = Number(fields.expiry);
  const options = { qos: Number(fields.qos), retain: fields.retain === "1", properties };
  client.publish(fields.topic, fields.payload, options, (error) => (error ? fail(error) : say("published", [])));
}

function burst(fields) {
  const options = { qos: Number(fields.qos), retain: fields.retain === "1" };
  const count = Number(fields.count);
  let done = 0;
  for (let n = 0; n < count; n += 1) {
    client.publish(`${fields.topic}/${n}`, fields.payload, options, (error) => {
      if (error) fail(error);
      done += 1;
      if (done === count) say("published", []);
    });
  }
}

function split(part) {
  const at = part.indexOf("=");
  return [part.slice(0, at), part.slice(at + 1)];
}

function onLine(line) {
  const [word, ...parts] = line.split("\t");
  const pairs = parts.map(split);
  const fields = { payload: "", ...Object.fromEntries(pairs) };
  const user = pairs.filter(([name]) => name === "user").map(([, pair]) => split(pair));
  if (word === "connect") connect(fields);
  else if (word === "subscribe") subscribe(fields);
  else if (word === "publish") publish(fields, user);
  else if (word === "burst") burst(fields);
  else client.end(false, {}, () => say("disconnected", []));
}

const input = readline.createInterface({ input: process.stdin });
input.on("line", onLine);
input.on("close", () => process.exit(0));
