// A line chart over time, as SVG. Its table of last values is its legend and its text for screen readers.

import { h, setText, svg } from "./dom.js";
import { duration } from "./format.js";

const WIDTH = 480;
const HEIGHT = 140;
const LEFT = 60; // for the values of the grid
const BOTTOM = 16; // for the times

/**
 * A chart of `names`, the lines, whose values `format` makes text; units grow by `base`. `update` takes one list of
 * points for each line.
 */
export function chart(title, names, format, base = 1000) {
  const lines = names.map((_, index) => svg("path", { class: `line line-${index}` }));
  const grid = [0, 1, 2].map((step) => {
    const y = bottom() - (step / 2) * (bottom() - 6);
    return {
      line: svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y, y2: y }),
      label: axisLabel(LEFT - 6, y + 4, "end"),
    };
  });
  const times = [axisLabel(LEFT, HEIGHT - 2, "start"), axisLabel(WIDTH, HEIGHT - 2, "end", "now")];
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" },
    grid.map((each) => each.line),
    grid.map((each) => each.label),
    times,
    lines,
  );
  const values = names.map(() => h("b", {}, "–"));
  const legend = h(
    "ul",
    { class: "legend" },
    names.map((name, index) => h("li", { class: `mark-${index}` }, `${name} `, values[index])),
  );
  const element = h("section", { class: "card chart", "aria-label": title }, h("h2", {}, title), legend, drawing);

  /**
   * Shows the points [Unix time, value] of the last `span` minutes before `now`; a null value interrupts a line.
   * `least` is the smallest value that the top of the grid may have.
   */
  function update(series, now, span, least = 1) {
    const begin = now - span * 60;
    const shown = series.map((points) => points.filter(([time]) => time >= begin));
    const top = roundUp(
      shown.flat().reduce((most, [, value]) => Math.max(most, value ?? least), least),
      base,
    );
    setText(times[0], `${duration(span * 60)} ago`);
    grid.forEach(({ label }, step) => setText(label, format((top * step) / 2)));
    shown.forEach((points, index) => {
      let drawn = false;
      const path = points.map(([time, value]) => {
        const begins = !drawn;
        drawn = value !== null;
        if (!drawn) return "";
        const x = WIDTH - ((now - time) / (span * 60)) * (WIDTH - LEFT);
        const place = `${x.toFixed(1)},${(bottom() - (value / top) * (bottom() - 6)).toFixed(1)}`;
        return begins ? `M${place}h0` : `L${place}`; // h0 draws a point that has no neighbour
      });
      lines[index].setAttribute("d", path.join(""));
      const last = points.at(-1)?.[1] ?? null;
      setText(values[index], last === null ? "–" : format(last));
    });
  }
  return { element, update };
}

const bottom = () => HEIGHT - BOTTOM;

function axisLabel(x, y, anchor, text = "") {
  return svg("text", { class: "axis", x, y, "text-anchor": anchor }, text);
}

/** The least round number of a unit that is not below a value; units are powers of `base`. */
function roundUp(value, base) {
  const unit = base ** Math.floor(Math.log(value) / Math.log(base));
  return unit * [1, 2, 5, 10, 20, 50, 100, 200, 500, base].find((factor) => factor * unit >= value);
}
