// The alarms that last, what /readyz says to load balancers, and the alarms that ended.

import { ask, readiness, segment } from "./api.js";
import { h, setChildren } from "./dom.js";
import { duration, time } from "./format.js";
import { table } from "./table.js";

const NAME = { title: "Alarm", text: (alarm) => alarm.name };
const REASON = { title: "Reason", text: (alarm) => alarm.reason, wide: true };

export function alarms({ act, may }) {
  const active = table(
    "Alarms",
    [
      NAME,
      REASON,
      { title: "Since", text: (alarm) => time(alarm.since) },
      { title: "Acknowledged", text: acknowledged },
      ...(may("operate") ? [{ title: "Action", node: button }] : []),
    ],
    (alarm) => alarm.name,
    "No alarms.",
  );
  const ended = table(
    "Ended alarms",
    [
      NAME,
      REASON,
      { title: "Ended", text: (alarm) => time(alarm.cleared) },
      { title: "Lasted", text: (alarm) => duration(alarm.cleared - alarm.since) },
    ],
    (alarm) => `${alarm.name} ${alarm.since}`,
    "None since the broker started.",
  );
  function button({ name }) {
    const acknowledge = async () => {
      const answer = await ask("POST", `/alarms/${segment(name)}/acknowledge`);
      latest = latest.map((alarm) => (alarm.name === name ? answer : alarm));
      active.show(latest);
    };
    return h("button", { type: "button", onclick: () => act(acknowledge) }, "Acknowledge");
  }

  let latest = []; // the active alarms
  const ready = h("ul", { class: "plain" });
  const element = h(
    "div",
    { class: "stack" },
    h("h1", {}, "Alarms"),
    active.element,
    h("h2", {}, "Readiness"),
    ready,
    h("h2", {}, "Ended"),
    ended.element,
  );

  async function refresh(status, alarms) {
    latest = alarms.active;
    active.show(latest);
    ended.show(alarms.cleared);
    const { reasons = [], warnings = [] } = await readiness();
    const state = reasons.length ? "Clients should not connect now:" : "Clients can connect.";
    setChildren(
      ready,
      [state, ...reasons, ...warnings.map((text) => `Warning: ${text}`)].map((text) => h("li", {}, text)),
    );
  }
  return { title: "Alarms", element, refresh };
}

const acknowledged = ({ acknowledged_by: by, acknowledged_at: at }) => (at === null ? "" : `by ${by} at ${time(at)}`);
