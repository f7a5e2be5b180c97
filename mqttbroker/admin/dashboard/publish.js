// The form that publishes a message in the name of the broker.

import { ask } from "./api.js";
import { h } from "./dom.js";
import { WrongValue, form, split } from "./form.js";
import { count, named } from "./format.js";

export const QOS = {
  name: "qos",
  label: "QoS",
  type: "select",
  value: "1",
  options: ["0", "1", "2"].map((n) => [n, n]),
};
export const PAYLOAD = { name: "payload", label: "Payload", type: "textarea", also: ["payload_base64"] };
export const ENCODING = {
  name: "encoding",
  label: "The payload is",
  type: "select",
  options: [
    ["text", "text"],
    ["base64", "base64"],
  ],
};
const FIELDS = [
  { name: "topic", label: "Topic", required: true },
  PAYLOAD,
  ENCODING,
  QOS,
  { name: "retain", label: "Retain", type: "checkbox" },
  { name: "message_expiry_interval", label: "Expires after (seconds)", type: "number" },
  { name: "content_type", label: "Content type" },
  { name: "response_topic", label: "Response topic" },
  { name: "user_properties", label: "User properties", type: "textarea", hint: "A line name=value for each." },
];

/** The body of a request to publish, of the values of a form. */
export function messageBody({ payload = "", encoding, qos, user_properties: lines, ...others }) {
  const body = { ...others, [encoding === "base64" ? "payload_base64" : "payload"]: payload, qos: Number(qos) };
  if (lines) body.user_properties = lines.split("\n").filter(Boolean).map(pair);
  return body;
}

function pair(line) {
  const [name, ...value] = line.split("=");
  if (!value.length) throw new WrongValue("user_properties", `the line ${named(line)} has no =`);
  return [name, value.join("=")];
}

export function publish({ act, notify, may }) {
  const publishing = form({ title: "Message", fields: FIELDS, button: "Publish", submit, act, notify });
  const needed = h(
    "p",
    { class: "empty" },
    "Only an operator or administrator publishes: set http.token or [[http.access]], and log in with a token.",
  );
  const element = h("div", {}, h("h1", {}, "Publish"), may("operate") ? publishing.element : needed);

  async function submit(values) {
    const body = messageBody(values);
    const deletes = values.retain && !values.payload;
    if (deletes && !confirm(`Without payload this deletes the retained message of ${named(values.topic)}. Go on?`))
      return null;
    const { recipients } = await ask("POST", "/publish", {}, body);
    return `Published to ${count(recipients)} subscriptions and streams.`;
  }
  return { title: "Publish", element, refresh() {}, shown: () => may("operate") && publishing.focus("topic") };
}

/** The form that sets a retained message. */
export function retainForm({ act, notify, changed }) {
  const fields = [{ name: "topic", label: "Topic", required: true }, { ...PAYLOAD, required: true }, ENCODING, QOS];

  async function submit(values) {
    const [{ topic }, message] = split(values, ["topic"]);
    await ask("PUT", "/retained/message", { topic }, messageBody(message));
    await changed(topic);
    return "The retained message was set.";
  }
  return form({ title: "Set a retained message", fields, button: "Set", submit, act, notify });
}

/** The form that deletes the retained messages that match a filter. */
export function clearForm({ act, notify, changed }) {
  async function submit({ filter }) {
    if (!confirm(`Delete all retained messages that match ${named(filter)}?`)) return null;
    const { deleted } = await ask("DELETE", "/retained", { filter });
    await changed();
    return `Deleted: ${count(deleted)} retained messages.`;
  }
  const fields = [{ name: "filter", label: "Topic filter", required: true }];
  return form({ title: "Delete retained messages", fields, button: "Delete all that match", submit, act, notify });
}
