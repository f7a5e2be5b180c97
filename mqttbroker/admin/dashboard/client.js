// One client: its session, its subscriptions, and what an operator may do with it.

import { LONGEST, ask, get, segment } from "./api.js";
import { h, setText } from "./dom.js";
import { brief, bytes, count, duration, named, time } from "./format.js";
import { table } from "./table.js";
import { trace } from "./trace.js";

const PAGE = 100;
const optional = (value, show) => (value == null ? "–" : show(value));
const yes = (value) => (value ? "yes" : "no");

const EXPIRY = { null: "never", 0: "it ends with the connection" };

const FIELDS = [
  ["State", (client) => (client.connected ? "connected" : "disconnected")],
  ["User", (client) => client.username ?? "anonymous"],
  ["Address", (client) => client.address ?? "–"],
  ["Listener", (client) => client.listener ?? "–"],
  ["MQTT", (client) => client.protocol],
  ["Connected since", (client) => optional(client.connected_at, time)],
  ["Disconnected since", (client) => optional(client.disconnected_at, time)],
  ["Keep alive", (client) => optional(client.keep_alive, duration)],
  ["Session expires", (client) => EXPIRY[client.expiry_interval] ?? duration(client.expiry_interval)],
  ["Stored", (client) => yes(client.persistent)],
  ["Queued messages", (client) => `${count(client.queued_messages)} (${bytes(client.queued_bytes)})`],
  ["In flight", (client) => `${count(client.in_flight)} of ${count(client.max_in_flight)}`],
  ["QoS 2 not released", (client) => count(client.incoming_qos2)],
  ["Retained messages to send", (client) => `${count(client.retained_pending)} subscriptions`],
  ["Will", (client) => yes(client.has_will)],
  ["Socket is full", (client) => yes(client.congested)],
  ["Received", (client) => `${count(client.messages_received)} messages, ${bytes(client.bytes_received)}`],
  ["Sent", (client) => `${count(client.messages_sent)} messages, ${bytes(client.bytes_sent)}`],
  ["Connection worker", (client) => (client.worker ? String(client.worker) : "none")],
];

export function client({ every, act, may, notify }, id) {
  const path = `/clients/${segment(id)}`;
  const values = FIELDS.map(([name, read]) => ({ name, read, value: h("dd", {}, "–") }));
  const gone = h("p", { class: "empty", hidden: true });
  const subscriptions = table(
    "Subscriptions",
    [
      { title: "Topic filter", text: (each) => each.topic_filter },
      { title: "QoS", number: true, text: (each) => String(each.qos) },
      { title: "No local", text: (each) => yes(each.no_local) },
      { title: "Retain as published", text: (each) => yes(each.retain_as_published) },
      { title: "Identifier", number: true, text: (each) => optional(each.identifier, String) },
    ],
    (each) => each.topic_filter,
    "No subscriptions.",
  );
  const more = h("button", { type: "button", hidden: true, onclick: () => act(loadMore) }, "More subscriptions");
  const disconnect = h("button", { type: "button", onclick: () => act(doDisconnect) }, "Disconnect");
  const remove = h("button", { type: "button", class: "danger", onclick: () => act(doDelete) }, "Delete session");
  const ban = h("a", { href: `#/bans/${segment(id)}` }, "Ban");
  const actions = h("div", { class: "bar" }, may("operate") ? [disconnect, remove, ban] : []);
  const packets = may("operate") ? trace({ act }, id) : null;
  const details = h(
    "dl",
    { class: "details card" },
    values.map(({ name, value }) => h("div", {}, h("dt", {}, name), value)),
  );
  const known = h("div", {}, actions, details, h("h2", {}, "Subscriptions"), subscriptions.element, more);
  const traced = packets && h("div", {}, h("h2", {}, "Packets"), packets.element);
  const element = h(
    "div",
    {},
    h("p", {}, h("a", { href: "#/clients" }, "All clients")),
    h("h1", { class: "id" }, brief(id)),
    gone,
    known,
    traced,
  );
  let items = [];
  let cursor = null;

  function hide(reason) {
    setText(gone, reason);
    gone.hidden = false;
    known.hidden = true;
  }

  async function load() {
    if (id.length > LONGEST) {
      if (traced) traced.hidden = true;
      return hide(`A client id of more than ${count(LONGEST)} characters has no page. A ban disconnects the client.`);
    }
    let found;
    try {
      found = await get(path);
    } catch (error) {
      if (error.status !== 404) throw error;
      return hide("There is no session with this client id.");
    }
    gone.hidden = true;
    known.hidden = false;
    for (const { read, value } of values) setText(value, read(found));
    disconnect.disabled = !found.connected;
    if (found.subscriptions !== items.length && cursor === null) await loadFirst();
  }

  async function loadFirst() {
    items = [];
    cursor = null;
    await loadMore();
  }

  async function loadMore() {
    const page = await get(`${path}/subscriptions`, { limit: PAGE, cursor });
    items = [...items, ...page.items];
    cursor = page.next_cursor;
    subscriptions.show(items);
    more.hidden = cursor === null;
  }

  async function doDisconnect() {
    if (!confirm(`Disconnect ${named(id)}?`)) return;
    await ask("POST", `${path}/disconnect`);
    notify("The client was disconnected.");
    await load();
  }

  async function doDelete() {
    if (!confirm(`Delete the session of ${named(id)}, with its subscriptions and queued messages?`)) return;
    await ask("DELETE", path);
    notify("The session was deleted.");
    await load();
  }

  const due = every(2000);
  act(load);
  return {
    title: brief(id),
    element,
    close: () => packets?.close(),
    refresh: async () => {
      if (due()) await load();
    },
  };
}
