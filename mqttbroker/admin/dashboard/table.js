// A table whose rows stay for as long as their keys do, so a refresh keeps focus and selection.

import { h, setChildren, setText } from "./dom.js";
import { brief } from "./format.js";

const LONGEST = 1000; // characters of a cell, unless it is wide

/**
 * `columns` are objects with `title` and one of `text(item)`, which each refresh calls, and `node(item)`, which is
 * called once for a row; `number: true` aligns to the right, `wide: true` breaks lines. `key(item)` tells rows apart.
 */
export function table(label, columns, key, empty) {
  const titles = columns.map((column) =>
    h("th", { scope: "col", class: column.number ? "number" : null }, column.title),
  );
  const body = h("tbody");
  const none = h("p", { class: "empty" }, empty);
  const scroll = h(
    "div",
    { class: "scroll", role: "region", tabindex: "0", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, titles)), body),
  );
  let rows = new Map();

  function makeRow(item) {
    const cells = columns.map((column) =>
      h("td", { class: column.number ? "number" : column.wide ? "wide" : null }, column.node?.(item)),
    );
    return h("tr", {}, cells);
  }

  function show(items) {
    const before = rows;
    rows = new Map(items.map((item) => [key(item), before.get(key(item)) ?? makeRow(item)]));
    for (const item of items) {
      columns.forEach((column, index) => {
        if (!column.text) return;
        const text = column.text(item);
        setText(rows.get(key(item)).cells[index], column.wide ? text : brief(text, LONGEST));
      });
    }
    setChildren(body, [...rows.values()]);
    none.hidden = items.length > 0;
    scroll.hidden = items.length === 0;
  }

  show([]);
  return { element: h("div", {}, scroll, none), show };
}
