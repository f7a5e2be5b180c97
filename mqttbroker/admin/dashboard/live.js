// The messages of a topic filter as they are published: MQTT over WebSocket from this page to a listener of the broker.

import { get } from "./api.js";
import { h, setText } from "./dom.js";
import { bytes, clock, count, payload } from "./format.js";
import { Subscription } from "./mqtt.js";
import { table } from "./table.js";

const KEPT = 200; // messages
const DRAW = 250; // ms between updates of the table
const RETRY = 2000; // ms until the next try to connect

export function live({ act }) {
  const shown = table(
    "Messages",
    [
      { title: "Time", text: (message) => clock(message.time) },
      { title: "Topic", text: (message) => message.topic },
      { title: "Payload", text: (message) => payload(message.payload, 1000), wide: true },
      { title: "Size", number: true, text: (message) => bytes(message.payload.length) },
      { title: "Retained", text: (message) => (message.retain ? "yes" : "") },
      { title: "Properties", text: describe },
    ],
    (message) => message.number,
    "No message yet.",
  );
  const filter = h("input", {
    id: "filter",
    "aria-label": "Topic filter",
    required: true,
    value: "#",
    spellcheck: "false",
  });
  const url = h("input", { "aria-label": "WebSocket listener", required: true, spellcheck: "false", size: 28 });
  const username = h("input", { "aria-label": "User name", placeholder: "User name", autocomplete: "off", size: 12 });
  const password = h("input", {
    "aria-label": "Password",
    placeholder: "Password",
    type: "password",
    autocomplete: "off",
    size: 12,
  });
  const start = h("button", {}, "Start");
  const stopButton = h("button", { type: "button", onclick: () => stop("Stopped."), disabled: true }, "Stop");
  const pause = h("button", { type: "button", onclick: togglePause, "aria-pressed": "false" }, "Pause");
  const clear = h("button", { type: "button", onclick: clearAll }, "Clear");
  const state = h("p", { class: "hint", role: "status" }, "");
  const none = h("div", { class: "card", hidden: true });
  const form = h(
    "form",
    { class: "bar", onsubmit: begin },
    filter,
    start,
    stopButton,
    pause,
    clear,
    url,
    username,
    password,
  );
  const element = h("div", {}, h("h1", {}, "Live messages"), none, form, state, shown.element);

  let wanted = null; // user name, password and filter of the last start
  let subscription = null;
  let retry = 0;
  let messages = []; // the newest first
  let received = 0;
  let paused = false;
  let stale = false; // messages that are not drawn

  async function findListener() {
    const types = location.protocol === "https:" ? ["wss"] : ["ws", "wss"];
    const { items } = await get("/listeners");
    const found = types.map((type) => items.find((each) => each.type === type)).find(Boolean);
    if (found) url.value = `${found.type}://${location.hostname}:${found.ports[0]}/mqtt`;
    none.hidden = Boolean(found);
    if (!found) none.replaceChildren(...advice(types[0], await defaultListener()));
  }

  function begin(event) {
    event.preventDefault();
    stop("");
    clearAll();
    wanted = { username: username.value, password: password.value, filter: filter.value };
    open();
  }

  function open() {
    setText(state, "Connecting.");
    stopButton.disabled = false;
    try {
      subscription = new Subscription(url.value, wanted, { opened, received: take, ended });
    } catch (error) {
      stop(error.message); // not a URL of a WebSocket, or ws from a page over HTTPS
    }
  }

  function opened() {
    setText(state, `Subscribed to ${wanted.filter}.`);
  }

  function ended(reason, final) {
    if (final) return stop(`Stopped: ${reason}.`);
    setText(
      state,
      `Disconnected: ${reason}. Trying again. A listener with origins must have ${location.origin} among them.`,
    );
    retry = setTimeout(open, RETRY);
  }

  function stop(reason) {
    clearTimeout(retry);
    subscription?.close();
    subscription = null;
    setText(state, reason);
    stopButton.disabled = true;
  }

  function take(message) {
    received += 1;
    stale = true;
    if (paused) return;
    messages.unshift({ ...message, number: received, time: new Date() });
    if (messages.length > 2 * KEPT) messages.length = KEPT;
  }

  function draw() {
    if (!stale) return;
    stale = false;
    messages.length = Math.min(messages.length, KEPT);
    if (!paused) shown.show(messages);
    if (subscription)
      setText(state, `Subscribed to ${wanted.filter}: ${count(received)} messages, the last ${KEPT} are shown.`);
  }

  function togglePause() {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
  }

  function clearAll() {
    messages = [];
    received = 0;
    shown.show(messages);
    if (subscription) opened();
  }

  const drawing = setInterval(draw, DRAW);
  act(findListener);
  return {
    title: "Live messages",
    element,
    refresh() {},
    close: () => {
      clearInterval(drawing);
      stop("");
    },
  };
}

// The table of the listener that the broker has because its file has no [[listeners]]; "" if the file has some.
async function defaultListener() {
  const { items } = await get("/configuration", { prefix: "listeners." });
  const inFile = ({ source }) => source !== "default" && !source.startsWith("--") && !source.startsWith("MQTTBROKER_");
  if (items.some(inFile)) return "";
  const { host, port } = Object.fromEntries(items.map(({ key, value }) => [key.replace("listeners.0.", ""), value]));
  return `[[listeners]]\nhost = ${JSON.stringify(host)}\nport = ${port}\n\n`;
}

function advice(type, first) {
  const secure =
    type === "wss" ? '\ncertfile = "/etc/mqttbroker/server.pem"\nkeyfile = "/etc/mqttbroker/server.key"' : "";
  const keep = first ? " With such a table the default listener is gone, so the first of these tables keeps it." : "";
  return [
    h("p", {}, `The broker has no listener that this page can use. Add one to its configuration, and restart it.${keep}`),
    h("pre", {}, `${first}[[listeners]]\ntype = "${type}"\nhost = "${location.hostname}"\nport = 8083${secure}`),
  ];
}

function describe({ qos, properties }) {
  const shown = properties.map(([name, value]) => {
    if (name === "user") return `${value[0]}=${value[1]}`;
    return `${name}: ${value instanceof Uint8Array ? payload(value, 100) : value}`;
  });
  return [...(qos ? [`QoS ${qos}`] : []), ...shown].join(", ");
}
