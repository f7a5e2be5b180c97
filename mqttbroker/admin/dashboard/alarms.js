// The alarms: why clients should not connect now, and what else needs an operator, as /readyz has it.

import { h, setChildren } from "./dom.js";

/** The alarms in an answer of /readyz: { severity, text }. */
export const alarmsOf = ({ reasons = [], warnings = [] }) => [
  ...reasons.map((text) => ({ severity: "not ready", text })),
  ...warnings.map((text) => ({ severity: "warning", text })),
];

export function alarms() {
  const list = h("ul", { class: "stack plain" });
  const none = h("p", { class: "empty" }, "No alarms: the broker is ready.");
  const element = h("div", {}, h("h1", {}, "Alarms"), list, none);

  function refresh(status, present) {
    setChildren(list, present.map(({ severity, text }) => h("li", { class: `card alarm ${severity === "warning" ? "" : "severe"}` }, h("b", {}, severity), " ", text)));
    none.hidden = present.length > 0;
  }
  return { title: "Alarms", element, refresh };
}
