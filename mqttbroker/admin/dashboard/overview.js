// The overview: figures of now, and charts of the recent past.

import { chart } from "./chart.js";
import { h, setText } from "./dom.js";
import { bytes, count, milliseconds, short } from "./format.js";
import { spanChoice } from "./span.js";

const perSecond = (value) => `${short(value)}/s`;
const bytesPerSecond = (value) => `${bytes(value)}/s`;
const rate = (...names) => ({ points: (history) => history.rate(...names) });
const drops = (...causes) => rate(...causes.map((cause) => `drops/${cause}`));
const gauge = (name) => ({ points: (history) => history.gauge(name) });
const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);

const FIGURES = [
  ["Clients", (status) => count(status.clients_connected)],
  ["Sessions", (status) => count(status.sessions)],
  ["Subscriptions", (status) => count(status.subscriptions)],
  ["Retained", (status) => count(status.retained_messages)],
  ["Queued", (status) => count(status.queued_messages)],
  ["Dropped", (status) => count(sum(status.drops))],
  ["Bans", (status) => count(status.bans)],
];

// Title, format, and the lines with their names; units of sizes grow by 1024.
const CHARTS = [
  ["Messages", perSecond, { received: rate("publish_received"), sent: rate("publish_sent") }],
  ["Traffic", bytesPerSecond, { received: rate("bytes_received"), sent: rate("bytes_sent") }],
  ["Connections", short, { clients: gauge("clients"), sessions: gauge("sessions") }],
  ["New connections", perSecond, { accepted: rate("connections"), refused: rate("refused") }],
  [
    "Dropped messages",
    perSecond,
    {
      "queue full": drops("queue_full", "queue_full_oldest", "total_full", "memory_full"),
      "slow subscriber": drops("slow_subscriber", "memory", "rate"),
      "not authorized": drops("not_authorized"),
      other: drops("refused", "too_large", "retained_full", "expired", "store_failed", "no_member"),
    },
  ],
  ["Queues on disk", short, { messages: gauge("queued_messages") }],
  ["Waiting for the disk", bytes, { bytes: gauge("store_pending_bytes") }],
  ["Memory", bytes, { resident: gauge("memory_resident"), counted: gauge("memory_counted") }],
  [
    "Latency, 99 % are below",
    milliseconds,
    {
      delivery: gauge("latency/delivery"),
      acknowledgement: gauge("latency/acknowledgement"),
      commit: gauge("latency/commit"),
      "event loop": gauge("latency/event_loop_lag"),
    },
  ],
];
const BASE_1024 = [bytes, bytesPerSecond];

export function overview({ history }) {
  const figures = FIGURES.map(([name, read]) => ({ read, value: h("dd", {}, "–"), name: h("dt", {}, name) }));
  const charts = CHARTS.map(([title, format, lines]) => ({
    lines: Object.values(lines),
    least: format === milliseconds ? 0.001 : 1,
    chart: chart(title, Object.keys(lines), format, BASE_1024.includes(format) ? 1024 : 1000),
  }));
  const choice = spanChoice(history, draw);
  const element = h(
    "div",
    {},
    h("h1", {}, "Overview"),
    h(
      "dl",
      { class: "figures" },
      figures.map(({ name, value }) => h("div", { class: "card" }, name, value)),
    ),
    choice.element,
    h(
      "div",
      { class: "charts" },
      charts.map((each) => each.chart.element),
    ),
  );

  function draw() {
    choice.show();
    for (const each of charts)
      each.chart.update(
        each.lines.map((line) => line.points(history)),
        history.now,
        history.span,
        each.least,
      );
  }

  async function refresh(status) {
    for (const { read, value } of figures) setText(value, read(status));
    await history.refresh();
    draw();
  }
  return { title: "Overview", element, refresh };
}
