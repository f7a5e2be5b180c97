// Light or dark: as the system has it, until the button chooses.

import { h, setText } from "./dom.js";

const KEY = "mqttbroker-theme";
const THEMES = ["system", "light", "dark"];

export function themeButton() {
  const button = h("button", { type: "button", class: "quiet", onclick: turn });

  function turn() {
    const theme = THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length];
    localStorage.setItem(KEY, theme);
    apply(theme);
  }

  function apply(theme) {
    document.documentElement.dataset.theme = theme;
    setText(button, `Theme: ${theme}`);
  }

  apply(current());
  return button;
}

function current() {
  const stored = localStorage.getItem(KEY);
  return THEMES.includes(stored) ? stored : "system";
}
