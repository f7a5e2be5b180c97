// Forms: what the API says of a value that is wrong stands beside its field.

import { h, setText } from "./dom.js";

let forms = 0; // for ids

/** What a page itself finds wrong in a value, as the API does with others. */
export class WrongValue extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/**
 * A form. `fields` are objects with `name`, that of the API, `label`, and perhaps `type` (that of an input, "textarea"
 * or "select" with `options`, pairs of value and text), `value`, `required`, `hint`, `also` (more names of the API for
 * the same field), and `spare`: it is hidden until the API asks for it. `submit` takes the values by name, without
 * empty texts, and returns what to say. `act` runs it. `clears` are the names of fields that are empty afterwards.
 */
export function form({ title, fields, button, submit, act, notify, clears = [] }) {
  const id = `form-${++forms}`;
  const parts = fields.map((field, index) => part(field, `${id}-${index}`));
  const problem = h("p", { class: "error", role: "alert" });
  const send = h("button", { class: "primary" }, button);
  const element = h(
    "form",
    { class: "card form", "aria-labelledby": id, onsubmit: begin },
    h("h2", { id }, title),
    parts.map((each) => each.element),
    problem,
    send,
  );

  function begin(event) {
    event.preventDefault();
    for (const each of parts) each.refuse("");
    setText(problem, "");
    act(run);
  }

  async function run() {
    send.disabled = true;
    try {
      const said = await submit(values());
      if (said == null) return; // the user said no
      for (const each of parts) if (clears.includes(each.name)) each.set("");
      notify(said);
    } catch (error) {
      if (!(error instanceof WrongValue) && (!error.status || error.general)) throw error;
      const wrong = parts.find((each) => each.names.includes(error.field));
      if (wrong) wrong.refuse(error.message.replace(`${error.field}: `, ""));
      else setText(problem, error.message);
    } finally {
      send.disabled = false;
    }
  }

  function values() {
    const entered = parts.map((each) => [each.name, each.get()]);
    return Object.fromEntries(entered.filter(([, value]) => value !== ""));
  }

  const find = (name) => parts.find((each) => each.name === name);
  return {
    element,
    set: (name, value) => find(name).set(value),
    focus: (name) => find(name).focus(),
    setTitle: (text) => setText(element.firstChild, text),
  };
}

function part({ name, label, type = "text", value = "", options = [], required, hint, also = [], spare }, id) {
  const described = [hint && `${id}-hint`, `${id}-error`].filter(Boolean).join(" ");
  const shared = { id, required, "aria-describedby": described, autocomplete: "off", spellcheck: "false" };
  const makes = {
    select: () =>
      h(
        "select",
        shared,
        options.map(([each, text]) => h("option", { value: each }, text)),
      ),
    textarea: () => h("textarea", { ...shared, rows: 4 }),
  };
  const input = makes[type]?.() ?? h("input", { ...shared, type: type === "password" ? "password" : type });
  if (type === "password") input.setAttribute("autocomplete", "new-password");
  if (type === "number") input.setAttribute("step", "any");
  const error = h("p", { class: "error", id: `${id}-error`, role: "alert" });
  const text = h("label", { for: id }, label);
  const note = hint ? h("p", { class: "hint", id: `${id}-hint` }, hint) : null;
  const check = type === "checkbox";
  const element = h(
    "div",
    { class: check ? "field check" : "field", hidden: Boolean(spare) },
    check ? [input, text] : [text, input],
    note,
    error,
  );

  function get() {
    if (check) return input.checked;
    return type === "number" && input.value !== "" ? Number(input.value) : input.value;
  }

  function set(given) {
    if (check) input.checked = Boolean(given);
    else input.value = given;
  }

  function refuse(reason) {
    setText(error, reason);
    if (!reason) return input.removeAttribute("aria-invalid");
    element.hidden = false;
    input.setAttribute("aria-invalid", "true");
    input.focus();
  }

  if (type !== "select" || value !== "") set(value);
  return { name, names: [name, ...also], element, get, set, refuse, focus: () => input.focus() };
}

/** Takes some keys out of values: [those, the rest]. */
export function split(values, names) {
  const chosen = (wanted) =>
    Object.fromEntries(Object.entries(values).filter(([name]) => names.includes(name) === wanted));
  return [chosen(true), chosen(false)];
}
