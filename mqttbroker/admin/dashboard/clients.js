// The list of clients: one page of the API at a time, found by id, state and order.

import { segment } from "./api.js";
import { h } from "./dom.js";
import { brief, bytes, count, time } from "./format.js";
import { pages } from "./pages.js";
import { table } from "./table.js";

const PAGE = 50;
const CHEAP = 20000; // sessions that the broker may visit for each refresh
const ORDERS = [
  ["client_id asc", "Client id"],
  ["connected_at desc", "Connected last"],
  ["disconnected_at desc", "Disconnected last"],
  ["queued_messages desc", "Longest queue"],
  ["subscriptions desc", "Most subscriptions"],
];

export const clientLink = (id) => h("a", { href: `#/clients/${segment(id)}` }, brief(id) || "(empty)");

export function clients({ every, act }) {
  const found = table(
    "Clients",
    [
      { title: "Client id", node: (client) => clientLink(client.client_id) },
      { title: "State", text: (client) => (client.connected ? "connected" : "disconnected") },
      { title: "User", text: (client) => client.username ?? "" },
      { title: "Address", text: (client) => client.address ?? "" },
      { title: "MQTT", text: (client) => client.protocol },
      { title: "Since", text: (client) => time(client.connected_at ?? client.disconnected_at) },
      { title: "Subscriptions", number: true, text: (client) => count(client.subscriptions) },
      { title: "Queued", number: true, text: (client) => count(client.queued_messages) },
      { title: "Size", number: true, text: (client) => bytes(client.queued_bytes) },
    ],
    (client) => client.client_id,
    "No such client.",
  );
  const contains = h("input", {
    type: "search",
    id: "contains",
    "aria-label": "Part of the client id",
    placeholder: "Part of the client id",
  });
  const state = h(
    "select",
    { "aria-label": "State", onchange: begin },
    h("option", { value: "" }, "All"),
    h("option", { value: "true" }, "Connected"),
    h("option", { value: "false" }, "Disconnected"),
  );
  const order = h(
    "select",
    { "aria-label": "Order", onchange: begin },
    ORDERS.map(([value, name]) => h("option", { value }, name)),
  );
  const form = h(
    "form",
    { class: "bar", role: "search", onsubmit: begin },
    contains,
    h("button", {}, "Search"),
    state,
    order,
  );
  const list = pages({ path: "/clients", limit: PAGE, show: found.show, act });
  const element = h("div", {}, h("h1", {}, "Clients"), form, found.element, list.element);
  let query = {};

  function begin(event) {
    event?.preventDefault();
    const [sort, direction] = order.value.split(" ");
    query = { contains: contains.value, connected: state.value, sort, order: direction };
    list.begin(query);
  }

  function cheap(status) {
    return status.sessions <= CHEAP || (!query.contains && query.sort === "client_id");
  }

  const due = every(4000);
  begin();
  return {
    title: "Clients",
    element,
    refresh: async (status) => {
      if (cheap(status) && due()) await list.load();
    },
  };
}
