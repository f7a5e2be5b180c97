// The login: a token of [[http.access]], which stays in this tab.

import { token } from "./api.js";
import { h } from "./dom.js";

/** Asks for a token; `reason` says why. `entered` is called after it was stored. */
export function login(reason, entered) {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: "false" });

  function submit(event) {
    event.preventDefault();
    token.set(field.value.trim());
    entered();
  }

  const element = h(
    "form",
    { class: "card login", onsubmit: submit },
    h("h1", {}, "Log in"),
    h("p", { role: "alert" }, reason),
    h("label", { for: "token" }, "Token"),
    field,
    h("button", {}, "Log in"),
    h("p", { class: "hint" }, "A token of [[http.access]], or http.token. It stays in this tab and ends with it."),
  );
  return { title: "Log in", element, refresh() {}, shown: () => field.focus() };
}
