// The bans in force, and the forms that add and lift them.

import { ask } from "./api.js";
import { h } from "./dom.js";
import { form } from "./form.js";
import { count, duration, named } from "./format.js";
import { pages } from "./pages.js";
import { table } from "./table.js";

const PAGE = 100;
const PROTOCOLS = [
  ["mqtt", "Clients of MQTT"],
  ["http", "Senders of wrong tokens (HTTP)"],
];
const KEYS = ["address", "username", "client_id"];

/** The list of bans; `clientId` is entered in the form. */
export function bans({ act, may, every, notify }, clientId = "") {
  const found = table(
    "Bans",
    [
      { title: "Address", text: (ban) => ban.address },
      { title: "User", text: (ban) => ban.username },
      { title: "Client id", text: (ban) => ban.client_id },
      { title: "Cause", text: (ban) => ban.cause.replaceAll("_", " ") },
      { title: "Reason", text: (ban) => ban.reason },
      { title: "Times", number: true, text: (ban) => count(ban.bans) },
      {
        title: "Ends",
        text: (ban) => (ban.seconds_left === null ? "when it is lifted" : `in ${duration(ban.seconds_left)}`),
      },
      ...(may("operate") ? [{ title: "Action", node: liftButton }] : []),
    ],
    (ban) => JSON.stringify([ban.protocol, ban.address, ban.username, ban.client_id, ban.cause]),
    "No bans.",
  );
  const protocol = h(
    "select",
    { "aria-label": "Bans of", onchange: begin },
    PROTOCOLS.map(([value, text]) => h("option", { value }, text)),
  );
  const list = pages({ path: "/bans", limit: PAGE, show: found.show, act });
  const adding = form({
    title: "Ban clients",
    fields: [
      { name: "address", label: "Address or network", hint: "192.0.2.7, or 192.0.2.0/24" },
      { name: "username", label: "User name" },
      {
        name: "client_id",
        label: "Client id",
        value: clientId,
        hint: "A ban applies to clients of which all that is given is true.",
      },
      { name: "seconds", label: "Seconds", type: "number", hint: "Empty: until it is lifted." },
      { name: "reason", label: "Reason" },
    ],
    button: "Ban",
    submit: add,
    act,
    notify,
    clears: [...KEYS, "seconds", "reason"],
  });
  const element = h(
    "div",
    {},
    h("h1", {}, "Bans"),
    h("div", { class: "bar" }, protocol),
    found.element,
    list.element,
    may("operate") ? adding.element : null,
  );

  function begin() {
    list.begin({ protocol: protocol.value });
  }

  function liftButton(ban) {
    const names = KEYS.filter((key) => ban[key]).map((key) => named(ban[key]));
    const label = `Lift the ban of ${names.join(", ")}`;
    return h("button", { type: "button", "aria-label": label, onclick: () => act(() => lift(ban)) }, "Lift");
  }

  async function lift({ protocol: of, address, username, client_id: id }) {
    await ask("DELETE", "/bans", { protocol: of, address, username, client_id: id });
    notify("The ban was lifted.");
    await list.load();
  }

  async function add(values) {
    const whom = KEYS.filter((key) => values[key]).map((key) => named(values[key]));
    if (whom.length && !confirm(`Ban ${whom.join(" and ")}? Clients that are connected are disconnected.`)) return null;
    const { disconnected } = await ask("POST", "/bans", {}, values);
    await list.load();
    return `Banned; ${count(disconnected)} clients were disconnected.`;
  }

  const due = every(4000);
  begin();
  return {
    title: "Bans",
    element,
    shown: () => clientId && may("operate") && adding.focus("seconds"),
    refresh: async () => {
      if (due()) await list.load();
    },
  };
}
