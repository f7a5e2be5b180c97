// The page: its header, the view that the address names, and requests for /status and /alarms every two seconds, which
// also tells whether the broker answers.

import { get, token } from "./api.js";
import { h, setChildren, setText } from "./dom.js";
import { clock } from "./format.js";
import { History } from "./history.js";
import { login } from "./login.js";
import { themeButton } from "./theme.js";
import { ALARMS, VIEWS, viewOf } from "./views.js";

const INTERVAL = 2000; // ms between two requests
const NO_ALARMS = { active: [], cleared: [] };
const UNKNOWN = "The token is not known to the broker.";
const NOTICE = 5000; // ms that a notice stays

const byId = (id) => document.getElementById(id);
const history = new History();
let access = null; // what the token allows; null = not known
let view = null;
let lostAt = null; // since when the broker does not answer
let timer = 0;
let noticeTimer = 0;

const services = {
  history,
  act,
  notify,
  may: (right) => access.rights.includes(right),
  /** A function that is true once per `interval` ms. */
  every(interval) {
    let last = Date.now();
    return () => {
      if (Date.now() - last < interval - INTERVAL / 2) return false;
      last = Date.now();
      return true;
    };
  },
};

// --- header --------------------------------------------------------------------------------------------------------

const links = VIEWS.map(({ path, name }) => h("a", { href: `#/${path}` }, name));
const sender = h("span", { class: "sender" });
const logout = h("button", { type: "button", class: "quiet", hidden: true, onclick: logOut }, "Log out");
const nav = h("nav", { "aria-label": "Views" }, links);
byId("header").append(h("a", { class: "brand", href: "#/overview" }, "mqttbroker"), nav, sender, themeButton(), logout);

/** Shows how many alarms last; none of them stands out that somebody has acknowledged. */
function showCount(active) {
  const name = VIEWS[ALARMS].name;
  setText(links[ALARMS], active.length ? `${name} (${active.length})` : name);
  links[ALARMS].classList.toggle(
    "alert",
    active.some((alarm) => alarm.acknowledged_at === null),
  );
}

function showHeader() {
  nav.hidden = access === null;
  setText(sender, access === null ? "" : `${access.name} (${access.role})`);
  logout.hidden = token.get() === null;
}

// --- views ---------------------------------------------------------------------------------------------------------

function show(next) {
  view?.close?.();
  view = next;
  document.title = `${view.title} – mqttbroker`;
  setChildren(byId("main"), [view.element]);
  view.shown?.();
}

function route() {
  if (access === null) return;
  const { view: named, open } = viewOf(location.hash);
  links.forEach((link, index) => {
    if (VIEWS[index] === named) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  show(open(services));
  poll();
}

/** Runs what a user asked for, and tells what went wrong. */
async function act(action) {
  try {
    await action();
  } catch (error) {
    failed(error);
  }
}

function failed(error) {
  if (error.status === 401) logIn(UNKNOWN);
  else if (error.general) lost(error.message);
  else if (error.status) notify(error.message);
  else throw error; // a defect of the page
}

function notify(text) {
  setText(byId("notice"), text);
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => setText(byId("notice"), ""), NOTICE);
}

// --- access --------------------------------------------------------------------------------------------------------

async function enter() {
  try {
    access = await get("/access");
  } catch (error) {
    if (error.status === 401) return logIn(token.get() ? UNKNOWN : "The broker needs a token.");
    if (error.status) return logIn(error.message);
    lost(error.message);
    timer = setTimeout(enter, INTERVAL);
    return;
  }
  found();
  if (!access.rights.includes("status"))
    return logIn(`${access.name} has role ${access.role}; the dashboard needs viewer.`);
  showHeader();
  route();
}

function logIn(reason) {
  access = null;
  token.clear();
  history.clear();
  clearTimeout(timer);
  showHeader();
  show(login(reason, enter));
}

function logOut() {
  logIn("You are logged out.");
}

// --- the connection to the broker ----------------------------------------------------------------------------------

function lost(reason) {
  lostAt ??= new Date();
  document.body.classList.add("lost");
  setText(byId("banner"), `No data since ${clock(lostAt)}: ${reason}. Trying again.`);
}

function found() {
  lostAt = null;
  document.body.classList.remove("lost");
  setText(byId("banner"), "");
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  const shown = view;
  try {
    const [status, alarms] = await Promise.all([get("/status"), services.may("list") ? get("/alarms") : NO_ALARMS]);
    if (access === null) return;
    found();
    showCount(alarms.active);
    if (shown === view) await shown.refresh(status, alarms);
  } catch (error) {
    if (access !== null) failed(error);
  } finally {
    clearTimeout(timer);
    if (access !== null) timer = setTimeout(poll, INTERVAL);
  }
}

// --- keyboard ------------------------------------------------------------------------------------------------------

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const named = VIEWS[Number(event.key) - 1];
  const search = document.querySelector("main input[type=search]");
  if (named) location.hash = `#/${named.path}`;
  else if (event.key === "/" && search) {
    event.preventDefault();
    search.focus();
  }
}

addEventListener("hashchange", route);
addEventListener("keydown", key);
document.addEventListener("visibilitychange", () => access !== null && poll());
showHeader();
enter();
