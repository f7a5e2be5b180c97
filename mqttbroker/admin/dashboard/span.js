// The choice of the time that charts show.

import { h, setChildren, setText } from "./dom.js";
import { duration, time } from "./format.js";

/** `changed` is called after a choice; `show` brings the element up to date. */
export function spanChoice(history, changed) {
  const since = h("span", { class: "hint" });
  const buttons = h("span", { class: "bar choice", role: "group", "aria-label": "Time that the charts show" });
  let made = "";

  function choose(minutes) {
    history.span = minutes;
    changed();
  }

  function show() {
    const { spans, span, began, now } = history;
    if (made !== spans.join()) {
      made = spans.join();
      const button = (minutes) =>
        h("button", { type: "button", onclick: () => choose(minutes) }, duration(minutes * 60));
      setChildren(buttons, spans.map(button));
    }
    spans.forEach((minutes, index) => buttons.children[index].setAttribute("aria-pressed", String(minutes === span)));
    const young = began !== null && began > now - span * 60;
    setText(since, young ? `Since ${time(began)}: the samples end with the broker's process.` : "");
  }
  return { element: h("div", { class: "bar" }, buttons, since), show };
}
