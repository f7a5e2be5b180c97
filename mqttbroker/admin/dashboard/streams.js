// The streams: their partitions, their growth, how far consumers and groups are behind, and the depth of queues.

import { get, segment } from "./api.js";
import { chart } from "./chart.js";
import { h, setChildren, setText } from "./dom.js";
import { bytes, count, duration, short } from "./format.js";
import { spanChoice } from "./span.js";
import { table } from "./table.js";

const OPEN = 3; // streams that are open at first
const QUEUE = "$queue/"; // begins the name under which a queue stands with the consumers
const total = (partitions, read) => partitions.reduce((sum, partition) => sum + read(partition), 0);

export function streams({ every, act, history }) {
  const choice = spanChoice(history, draw);
  const list = h("div", { class: "stack" });
  const none = h(
    "p",
    { class: "empty", hidden: true },
    "The broker has no streams that you may see: docs/spark.md tells how to add one.",
  );
  const element = h("div", {}, h("h1", {}, "Streams"), none, choice.element, list);
  let cards = new Map();

  let queues = {}; // of all streams, as /status has them

  async function load() {
    const { items } = await get("/streams");
    const before = cards;
    cards = new Map(items.map((item, index) => [item.name, before.get(item.name) ?? stream(item, index < OPEN, act)]));
    setChildren(
      list,
      [...cards.values()].map((card) => card.element),
    );
    none.hidden = items.length > 0;
    for (const item of items) await cards.get(item.name).show(item, queues);
    await history.refresh();
    draw();
  }

  function draw() {
    choice.show();
    for (const card of cards.values()) card.draw(history);
  }

  const due = every(4000);
  act(load);
  return {
    title: "Streams",
    element,
    refresh: async (status) => {
      queues = status.queues;
      if (due()) await load();
    },
  };
}

/** One stream; its consumers are asked for while it is open. */
function stream({ name }, open, act) {
  const partitions = table(
    `Partitions of ${name}`,
    [
      { title: "Partition", number: true, text: (each) => String(each.partition) },
      { title: "First offset", number: true, text: (each) => count(each.log_start_offset) },
      { title: "Next offset", number: true, text: (each) => count(each.high_watermark) },
      { title: "Records", number: true, text: (each) => count(each.high_watermark - each.log_start_offset) },
      { title: "Segments", number: true, text: (each) => count(each.segments) },
      { title: "Size", number: true, text: (each) => bytes(each.bytes) },
    ],
    (each) => each.partition,
    "No partitions.",
  );
  const consumers = table(
    `Consumers of ${name}`,
    [
      { title: "Consumer", text: (each) => each.consumer },
      { title: "Lag", number: true, text: (each) => count(each.lag) },
      { title: "Behind", number: true, text: (each) => duration(each.lag_seconds) },
      { title: "Reported", text: (each) => `${duration(each.report_age_seconds)} ago` },
      { title: "Retention", text: retention },
    ],
    (each) => each.consumer,
    "No consumer has reported.",
  );
  const groups = table(
    `Groups of ${name}`,
    [
      { title: "Group", text: (each) => each.group },
      { title: "Filter", text: (each) => each.filter || "all" },
      { title: "Lag", number: true, text: (each) => count(each.lag) },
      { title: "In flight", number: true, text: (each) => count(each.in_flight) },
      { title: "Returned", number: true, text: (each) => count(each.redelivered) },
      { title: "Refused", number: true, text: (each) => count(each.refused) },
      { title: "Members", text: members, wide: true },
    ],
    (each) => each.group,
    "No groups.",
  );
  const queues = table(
    `Queues of ${name}`,
    [
      { title: "Queue", text: (each) => each.name },
      { title: "Depth", number: true, text: (each) => count(each.depth) },
      { title: "In flight", number: true, text: (each) => count(each.in_flight) },
      { title: "Oldest", number: true, text: (each) => duration(each.oldest) },
      { title: "Consumers", number: true, text: (each) => count(each.consumers) },
      { title: "Delivered again", number: true, text: (each) => count(each.redeliveries) },
      { title: "Dead letters", number: true, text: (each) => count(each.dead_letters) },
    ],
    (each) => each.name,
    "No queues.",
  );
  let ofStream = []; // its queues
  const growth = chart("Records", ["stored"], (value) => `${short(value)}/s`);
  const lag = chart("Lag", ["largest"], short);
  const summary = h("span", { class: "hint" });
  const described = h("p", { class: "hint" });
  const element = h(
    "details",
    { class: "card", open, ontoggle: () => element.open && act(loadConsumers) },
    h("summary", {}, h("b", {}, name), " ", summary),
    described,
    h("div", { class: "charts" }, growth.element, lag.element),
    h("h3", {}, "Consumers"),
    consumers.element,
    h("h3", {}, "Groups"),
    groups.element,
    h("h3", {}, "Queues"),
    queues.element,
    h("h3", {}, "Partitions"),
    partitions.element,
  );
  async function show(item, all) {
    ofStream = Object.entries(all)
      .filter(([, each]) => each.stream === name)
      .map(([queue, each]) => ({ name: queue, ...each }));
    const stored = total(item.partitions, (each) => each.high_watermark - each.log_start_offset);
    setText(summary, `${count(stored)} records, ${bytes(total(item.partitions, (each) => each.bytes))}`);
    setText(described, describe(item));
    partitions.show(item.partitions);
    if (element.open) await loadConsumers();
  }

  async function loadConsumers() {
    const path = `/streams/${segment(name)}`;
    const [{ items }, found] = await Promise.all([get(`${path}/consumers`), get(`${path}/groups`)]);
    const known = new Map(items.map((each) => [each.consumer, each]));
    consumers.show(items);
    groups.show(found.items.map((each) => ({ ...each, lag: known.get(`$share/${each.group}`)?.lag ?? 0 })));
    queues.show(ofStream.map((each) => ({ ...each, oldest: known.get(QUEUE + each.name)?.lag_seconds ?? 0 })));
  }

  function draw(history) {
    growth.update([history.rate(`stream/${name}/records`)], history.now, history.span);
    lag.update([history.gauge(`stream/${name}/lag`)], history.now, history.span);
  }
  return { element, show, draw };
}

/** Filters and settings as a sentence. */
function describe({ filters, settings }) {
  const limits = [
    settings.retention_age === null ? null : `records of ${duration(settings.retention_age)}`,
    settings.retention_bytes === null ? null : bytes(settings.retention_bytes),
  ].filter(Boolean);
  const shown =
    filters.length > 20
      ? `${filters.slice(0, 20).join(", ")} and ${count(filters.length - 20)} more`
      : filters.join(", ");
  const kept = limits.length ? `keeps ${limits.join(" and ")}` : "keeps everything";
  const others = [settings.dedup && "drops repeats", settings.archive && `archives to ${settings.archive}`].filter(
    Boolean,
  );
  return [`Stores ${shown}`, `key: ${settings.key}`, kept, ...others].join("; ") + ".";
}

const members = ({ members }) =>
  members.map(({ client_id: id, partitions }) => `${id}: ${partitions.join(", ") || "none"}`).join("; ");

function retention({ partitions, at_risk: atRisk }) {
  const lost = total(partitions, (each) => each.lost);
  if (lost) return `${count(lost)} records lost`;
  const left = partitions.map((each) => each.seconds_left).filter((seconds) => seconds !== null);
  if (left.length) return `${atRisk ? "at risk: " : ""}${duration(Math.max(0, Math.min(...left)))} left`;
  return atRisk ? "at risk" : "";
}
