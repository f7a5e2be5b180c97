// The views, in the order of the navigation. A view is a function of the page's services that returns its title, its
// element, `refresh(status, alarms)`, called after each answer of /status and /alarms, and perhaps `shown` and `close`.

import { accounts } from "./accounts.js";
import { alarms } from "./alarms.js";
import { bans } from "./bans.js";
import { client } from "./client.js";
import { clients } from "./clients.js";
import { live } from "./live.js";
import { overview } from "./overview.js";
import { publish } from "./publish.js";
import { streams } from "./streams.js";
import { topics } from "./topics.js";

export const VIEWS = [
  { path: "overview", name: "Overview", open: overview },
  { path: "clients", name: "Clients", open: clients, one: client },
  { path: "topics", name: "Topics", open: topics },
  { path: "live", name: "Live messages", open: live },
  { path: "publish", name: "Publish", open: publish },
  { path: "streams", name: "Streams", open: streams },
  { path: "alarms", name: "Alarms", open: alarms },
  { path: "bans", name: "Bans", open: bans, one: bans },
  { path: "accounts", name: "Users and rules", open: accounts },
];
export const ALARMS = VIEWS.findIndex(({ path }) => path === "alarms");

/** The view that the fragment of the address names: #/clients, #/clients/ID */
export function viewOf(fragment) {
  const [path, ...rest] = fragment.replace(/^#\//, "").split("/");
  const view = VIEWS.find((each) => each.path === path) ?? VIEWS[0];
  if (rest.length && view.one) return { view, open: (services) => view.one(services, decode(rest.join("/"))) };
  return { view, open: view.open };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a % that encodes nothing
  }
}
