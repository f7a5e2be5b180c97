// Users of the password files and rules of the ACL files, and the forms that change them.

import { ask, segment } from "./api.js";
import { h, setText } from "./dom.js";
import { form, split } from "./form.js";
import { named } from "./format.js";
import { pages } from "./pages.js";
import { table } from "./table.js";

const PAGE = 100;
const FILE = { name: "file", label: "File", spare: true };

export function accounts(services) {
  const users = userSection(services);
  const rules = ruleSection(services);
  const parts = [h("h1", {}, "Users and rules"), users.element, rules.element];
  users.begin();
  rules.begin();
  return { title: "Users and rules", element: h("div", { class: "stack" }, parts), refresh() {} };
}

/** A list with forms; if the broker has no such file, it says so in their place. */
function section({ title, path, found, forms, bar, query, act }) {
  const none = h("p", { class: "empty", hidden: true });
  const list = pages({ path, limit: PAGE, show: found.show, act: (load) => act(() => known(load)) });
  const shown = h("div", { hidden: true }, bar, found.element, list.element, h("div", { class: "columns" }, forms));
  const element = h("section", { "aria-label": `${title} and forms` }, h("h2", {}, title), none, shown);

  async function known(load) {
    try {
      await load();
      shown.hidden = false;
      none.hidden = true;
    } catch (error) {
      if (error.status !== 409 && error.status !== 403) throw error;
      setText(none, error.message);
      none.hidden = false;
    }
  }

  const begin = () => list.begin(query());
  return { element, begin, load: () => known(list.load) };
}

/** A search for entries of one name. */
function search(label, begin) {
  const input = h("input", { type: "search", "aria-label": label, placeholder: label, spellcheck: "false" });
  const submit = (event) => {
    event.preventDefault();
    begin();
  };
  return {
    element: h(
      "form",
      { class: "bar", role: "search", "aria-label": label, onsubmit: submit },
      input,
      h("button", {}, "Search"),
    ),
    input,
  };
}

const rowButton = (text, label, act, action, danger = false) =>
  h(
    "button",
    { type: "button", "aria-label": label, class: danger ? "danger" : null, onclick: () => act(action) },
    text,
  );

// --- users -----------------------------------------------------------------------------------------------------------

function userSection({ act, may, notify }) {
  const administrator = may("administer");
  const actions = ({ username, file }) => [
    rowButton("Password", `Set the password of ${named(username)}`, act, async () => choose(username, file)),
    " ",
    rowButton("Delete", `Delete ${named(username)}`, act, () => remove(username, file), true),
  ];
  const found = table(
    "Users",
    [
      { title: "User", text: (user) => user.username },
      { title: "Hash", text: (user) => user.hash },
      { title: "File", text: (user) => user.file },
      ...(administrator ? [{ title: "Actions", node: actions }] : []),
    ],
    (user) => JSON.stringify([user.file, user.username]),
    "No users.",
  );
  const secret = [
    { name: "password", label: "Password", type: "password", required: true },
    { name: "scram", label: "Also for SCRAM-SHA-256", type: "checkbox" },
  ];
  const adding = form({
    title: "Add a user",
    fields: [{ name: "username", label: "User name", required: true }, ...secret, FILE],
    button: "Add",
    submit: add,
    act,
    notify,
    clears: ["username", "password"],
  });
  const changing = form({
    title: "",
    fields: secret,
    button: "Set password",
    submit: set,
    act,
    notify,
    clears: ["password"],
  });
  changing.element.hidden = true;
  const prefix = search("Beginning of the user name", () => own.begin());
  const own = section({
    title: "Users",
    path: "/users",
    found,
    forms: administrator ? [changing.element, adding.element] : [],
    bar: prefix.element,
    query: () => ({ prefix: prefix.input.value }),
    act,
  });
  let chosen = null; // the user whose password is to be set

  function choose(username, file) {
    chosen = { username, file };
    changing.setTitle(`Password of ${named(username)}`);
    changing.element.hidden = false;
    changing.focus("password");
  }

  async function set(values) {
    const { username, file } = chosen;
    if (!confirm(`Set the password of ${named(username)}? Clients that used the old one are disconnected.`))
      return null;
    await ask("PUT", `/users/${segment(username)}/password`, { file }, values);
    changing.element.hidden = true;
    await own.load();
    return `The password of ${named(username)} was set.`;
  }

  async function add(values) {
    const [query, body] = split(values, ["file"]);
    await ask("POST", "/users", query, body);
    await own.load();
    return `${named(values.username)} was added.`;
  }

  async function remove(username, file) {
    if (!confirm(`Delete ${named(username)}? Its clients are disconnected.`)) return;
    await ask("DELETE", `/users/${segment(username)}`, { file });
    notify(`${named(username)} was deleted.`);
    await own.load();
  }
  return own;
}

// --- rules -----------------------------------------------------------------------------------------------------------

const ACCESS = ["readwrite", "read", "write", "deny"];

function subject({ username, pattern }) {
  if (username !== null) return username;
  return pattern ? "all clients (pattern)" : "anonymous clients";
}

function ruleSection({ act, may, notify }) {
  const administrator = may("administer");
  const label = (rule) => `Delete the rule ${rule.access} ${named(rule.filter)} for ${named(subject(rule))}`;
  const found = table(
    "Rules",
    [
      { title: "For", text: subject },
      { title: "Access", text: (rule) => rule.access },
      { title: "Topic filter", text: (rule) => rule.filter },
      { title: "File", text: (rule) => rule.file },
      ...(administrator
        ? [{ title: "Action", node: (rule) => rowButton("Delete", label(rule), act, () => remove(rule), true) }]
        : []),
    ],
    (rule) => JSON.stringify(rule),
    "No rules.",
  );
  const adding = form({
    title: "Add a rule",
    fields: [
      {
        name: "username",
        label: "User name",
        hint: "Empty: for anonymous clients, or all clients if it is a pattern.",
      },
      { name: "pattern", label: "Pattern", type: "checkbox", hint: "%c and %u stand for client id and user name." },
      { name: "access", label: "Access", type: "select", options: ACCESS.map((each) => [each, each]) },
      { name: "filter", label: "Topic filter", required: true },
      FILE,
    ],
    button: "Add",
    submit: add,
    act,
    notify,
    clears: ["filter"],
  });
  const user = search("User name", () => own.begin());
  const own = section({
    title: "Rules",
    path: "/acl/rules",
    found,
    forms: administrator ? [adding.element] : [],
    bar: user.element,
    query: () => ({ username: user.input.value }),
    act,
  });

  async function add(values) {
    const [query, body] = split(values, ["file"]);
    if (body.access === "deny" && !confirm(`Deny ${named(body.filter)}? Clients that use it lose it at once.`))
      return null;
    await ask("POST", "/acl/rules", query, body);
    await own.load();
    return "The rule was added, and is in force.";
  }

  async function remove(rule) {
    if (!confirm(`${label(rule)}? It is in force at once.`)) return;
    await ask("DELETE", "/acl/rules", rule);
    notify("The rule was deleted.");
    await own.load();
  }
  return own;
}
