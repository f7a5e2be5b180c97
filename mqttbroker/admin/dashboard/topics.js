// The tree of retained topics, one level at a time, and the message of the topic that is chosen.

import { LONGEST, ask, get } from "./api.js";
import { h, setChildren, setText } from "./dom.js";
import { brief, bytes, count, fromBase64, named, payload, time } from "./format.js";
import { clearForm, retainForm } from "./publish.js";

const PAGE = 100;
const REFRESHED = 20; // open levels that are asked for again
const TOO_LONG = `A topic of more than ${count(LONGEST)} characters is not shown here: subscribe to it.`;

export function topics({ every, act, may, notify }) {
  const setting = retainForm({ act, notify, changed });
  const clearing = clearForm({ act, notify, changed: refreshAll });
  const detail = message({ act, may, notify, deleted: refreshAll, chosen: (topic) => setting.set("topic", topic) });
  const root = level(null, { act, choose: detail.show });
  const element = h(
    "div",
    {},
    h("h1", {}, "Topics"),
    h(
      "div",
      { class: "columns" },
      h("section", { class: "card tree", "aria-label": "Retained topics" }, root.element),
      h("div", { class: "stack" }, detail.element, may("operate") ? [setting.element, clearing.element] : []),
    ),
  );

  async function changed(topic) {
    detail.choose(topic);
    await refreshAll();
  }

  async function refreshAll() {
    for (const each of root.open().slice(0, REFRESHED)) {
      try {
        await each.load();
      } catch (error) {
        if (!error.status || error.general) throw error; // else it was said when the level was opened
      }
    }
    await detail.load();
  }

  const due = every(4000);
  act(root.load);
  return {
    title: "Topics",
    element,
    refresh: async () => {
      if (due()) await refreshAll();
    },
  };
}

/** The topics below `parent`. `load` asks for as many as are shown, at least for one page. */
function level(parent, { act, choose }) {
  const list = h("ul");
  const more = h("button", { type: "button", hidden: true, onclick: () => act(() => load(wanted + PAGE)) }, "More");
  const empty = h("p", { class: "empty", hidden: true }, "No retained messages.");
  let wanted = PAGE;
  let children = new Map();

  async function load(most = wanted) {
    if (parent?.length > LONGEST) {
      setText(empty, TOO_LONG);
      empty.hidden = false;
      return;
    }
    wanted = most;
    const items = [];
    let cursor = null;
    do {
      const limit = Math.min(wanted - items.length, 1000);
      const page = await get("/retained/levels", { parent, limit, cursor });
      items.push(...page.items);
      cursor = page.next_cursor;
    } while (cursor !== null && items.length < wanted);
    const before = children;
    children = new Map(items.map((item) => [item.topic, keep(before.get(item.topic), item)]));
    setChildren(
      list,
      [...children.values()].map((child) => child.element),
    );
    more.hidden = cursor === null;
    empty.hidden = items.length > 0 || parent !== null;
  }

  function keep(child, item) {
    const kept = child?.below === item.below ? child : entry(item, { act, choose });
    kept.show(item);
    return kept;
  }

  const open = () => [{ load }, ...[...children.values()].flatMap((child) => child.open())];
  return { element: h("div", {}, list, more, empty), load, open };
}

/** One level of the tree: a branch that opens, or a leaf. */
function entry({ topic, level: name, below }, { act, choose }) {
  const value = h("button", {
    type: "button",
    class: "value",
    onclick: (event) => {
      event.preventDefault();
      choose(topic);
    },
  });
  const label = [h("span", { class: "level" }, brief(name) || "(empty)"), " ", value];
  let inner = null;

  function toggle() {
    if (!details.open) return;
    if (inner === null) {
      inner = level(topic, { act, choose });
      details.append(inner.element);
    }
    act(inner.load);
  }

  const details = below && h("details", { ontoggle: toggle }, h("summary", {}, label));
  const element = h("li", {}, below ? details : label);

  function show(item) {
    const data = item.payload_base64 === null ? null : fromBase64(item.payload_base64);
    value.hidden = data === null;
    if (data) setText(value, payload(data, 80) || "(empty)");
  }
  return { element, below, show, open: () => (inner && details.open ? inner.open() : []) };
}

/** The retained message of a topic. */
function message({ act, may, notify, deleted, chosen: tell }) {
  const fields = [
    "Topic",
    "Payload",
    "QoS",
    "Size",
    "Publisher",
    "Received",
    "Expires",
    "Content type",
    "Response topic",
    "User properties",
  ];
  const values = fields.map((name) => h(name === "Payload" ? "pre" : "dd", {}));
  const remove = h("button", { type: "button", class: "danger", onclick: () => act(doDelete) }, "Delete message");
  const content = h(
    "div",
    { hidden: true },
    h(
      "dl",
      {},
      fields.map((name, index) => [h("dt", {}, name), name === "Payload" ? h("dd", {}, values[index]) : values[index]]),
    ),
    may("operate") ? remove : null,
  );
  const hint = h("p", { class: "empty" }, "Choose a value to see its message.");
  const element = h("section", { class: "card details-pane", "aria-label": "Message" }, hint, content);
  let topic = null;

  function choose(chosen, then = () => {}) {
    topic = chosen;
    tell(topic);
    act(() => load().then(then));
  }

  /** Choose a topic of the tree. On a narrow page the message is below the tree, out of sight. */
  function show(chosen) {
    choose(chosen, () => element.scrollIntoView({ block: "nearest" }));
  }

  async function load() {
    if (topic === null) return;
    if (topic.length > LONGEST) return close(TOO_LONG);
    const asked = topic;
    let found;
    try {
      found = await get("/retained/message", { topic });
    } catch (error) {
      if (!error.status || error.general) throw error;
      return close(error.status === 404 ? "The topic has no retained message any more." : error.message);
    }
    if (asked !== topic) return;
    const data = fromBase64(found.payload_base64);
    const texts = [
      found.topic,
      payload(data, 20000),
      String(found.qos),
      bytes(data.length),
      found.client_id ?? "the broker",
      time(found.timestamp_us / 1e6),
      found.expires_at_us ? time(found.expires_at_us / 1e6) : "never",
      found.content_type ?? "–",
      found.response_topic ?? "–",
      found.user_properties.map(([name, value]) => `${name}=${value}`).join(", ") || "–",
    ];
    texts.forEach((text, index) => setText(values[index], text));
    content.hidden = false;
    hint.hidden = true;
  }

  function close(reason) {
    setText(hint, reason);
    topic = null;
    content.hidden = true;
    hint.hidden = false;
  }

  async function doDelete() {
    if (!confirm(`Delete the retained message of ${named(topic)}?`)) return;
    await ask("DELETE", "/retained/message", { topic });
    notify("The retained message was deleted.");
    await deleted();
  }
  return { element, choose, show, load };
}
