// A trace: the packets of one client as they come, as lines.

import { lines } from "./api.js";
import { h, setText } from "./dom.js";
import { count } from "./format.js";

const KEPT = 500; // lines
const SECONDS = 300;
const DRAW = 250; // ms between updates

export function trace({ act }, id) {
  const start = h("button", { type: "button", onclick: () => act(run) }, "Trace");
  const stopButton = h("button", { type: "button", onclick: stop, disabled: true }, "Stop the trace");
  const state = h("span", { class: "hint", role: "status" });
  const output = h("pre", { tabindex: "0", role: "region", "aria-label": "Packets", class: "card", hidden: true });
  const element = h("div", {}, h("div", { class: "bar" }, start, stopButton, state), output);
  let aborting = null;
  let kept = [];
  let received = 0;
  let stale = false;

  function draw() {
    if (!stale) return;
    stale = false;
    kept = kept.slice(-KEPT);
    const bottom = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
    setText(output, kept.join("\n"));
    if (bottom) output.scrollTop = output.scrollHeight;
    setText(state, `${count(received)} packets; the last ${KEPT} are shown.`);
  }

  async function run() {
    const own = (aborting = new AbortController());
    const drawing = setInterval(draw, DRAW);
    kept = [];
    received = 0;
    setText(output, "");
    setText(state, `Tracing for ${SECONDS / 60} minutes.`);
    output.hidden = false;
    start.disabled = true;
    stopButton.disabled = false;
    try {
      for await (const line of lines("/trace", { client_id: id, format: "text", seconds: SECONDS }, own.signal)) {
        kept.push(line);
        if (kept.length > 2 * KEPT) kept.splice(0, KEPT);
        received += 1;
        stale = true;
      }
      draw();
      setText(state, `The trace has ended: ${count(received)} packets.`);
    } catch (error) {
      if (error.general || !error.status) throw error;
      output.hidden = true;
      setText(state, error.message);
    } finally {
      clearInterval(drawing);
      start.disabled = false;
      stopButton.disabled = true;
    }
  }

  function stop() {
    aborting?.abort();
  }
  return { element, close: stop };
}
