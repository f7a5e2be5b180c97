// A list of the API, one page at a time.

import { get } from "./api.js";
import { h } from "./dom.js";

/**
 * `show` takes the items of a page. `begin` asks for the first page of a query, `load` again for the page that is shown.
 */
export function pages({ path, limit, show, act }) {
  const previous = h("button", { type: "button", onclick: back, disabled: true }, "Previous");
  const next = h("button", { type: "button", onclick: forward, disabled: true }, "Next");
  const element = h("div", { class: "bar pager", hidden: true }, previous, next);
  let query = {};
  let cursors = [null]; // of the pages up to the one that is shown
  let following = null;

  function begin(given = {}) {
    query = given;
    cursors = [null];
    act(load);
  }

  function back() {
    cursors.pop();
    act(load);
  }

  function forward() {
    cursors.push(following);
    act(load);
  }

  async function load() {
    const asked = [query, cursors.at(-1), cursors.length];
    let page;
    try {
      page = await get(path, { ...query, limit, cursor: cursors.at(-1) });
    } catch (error) {
      if (error.status !== 404 || cursors.length === 1) throw error;
      cursors = [null]; // the broker was started again, or forgot the cursor
      return load();
    }
    // Another page may have been asked for meanwhile.
    if (asked[0] !== query || asked[1] !== cursors.at(-1) || asked[2] !== cursors.length) return;
    following = page.next_cursor;
    show(page.items);
    previous.disabled = cursors.length === 1;
    next.disabled = following === null;
    element.hidden = previous.disabled && next.disabled;
  }
  return { element, begin, load };
}
