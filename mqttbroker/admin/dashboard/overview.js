// The overview: figures of now, and charts of the last minutes.

import { chart } from "./chart.js";
import { metrics } from "./api.js";
import { h, setText } from "./dom.js";
import { bytes, count, milliseconds, short } from "./format.js";
import { histograms, quantile } from "./latency.js";

const perSecond = (value) => `${short(value)}/s`;
const bytesPerSecond = (value) => `${bytes(value)}/s`;
const rate = (read) => (history) => history.rate(read);
const gauge = (read) => (history) => history.gauge(read);
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
  [
    "Messages",
    perSecond,
    {
      received: rate((status) => status.totals.publish_received),
      sent: rate((status) => status.totals.publish_sent),
    },
  ],
  [
    "Traffic",
    bytesPerSecond,
    {
      received: rate((status) => status.totals.bytes_received),
      sent: rate((status) => status.totals.bytes_sent),
    },
  ],
  [
    "Connections",
    short,
    {
      clients: gauge((status) => status.clients_connected),
      sessions: gauge((status) => status.sessions),
    },
  ],
  [
    "New connections",
    perSecond,
    {
      accepted: rate((status) => status.totals.connections),
      refused: rate((status) => status.totals.connections_refused + status.logins_failed + status.logins_banned),
    },
  ],
  [
    "Dropped messages",
    perSecond,
    {
      "queue full": rate(
        ({ drops }) => drops.queue_full + drops.queue_full_oldest + drops.total_full + drops.memory_full,
      ),
      "slow subscriber": rate(({ drops }) => drops.slow_subscriber + drops.memory + drops.rate),
      "not authorized": rate(({ drops }) => drops.not_authorized),
      other: rate(
        ({ drops }) => drops.refused + drops.too_large + drops.retained_full + drops.expired + drops.store_failed,
      ),
    },
  ],
  ["Queues on disk", short, { messages: gauge((status) => status.queued_messages) }],
  ["Waiting for the disk", bytes, { bytes: gauge((status) => status.store_pending_bytes) }],
  [
    "Memory",
    bytes,
    {
      resident: gauge((status) => status.memory.resident),
      counted: gauge((status) => status.memory.counted),
    },
  ],
];

const POINTS = 100; // of each latency

// Histograms of /metrics, and their names in the chart.
const LATENCIES = {
  delivery: "delivery",
  acknowledgement: "acknowledgement",
  commit: "commit",
  event_loop_lag: "event loop",
};

export function overview({ every, history }) {
  const figures = FIGURES.map(([name, read]) => ({ read, value: h("dd", {}, "–"), name: h("dt", {}, name) }));
  const charts = CHARTS.map(([title, format, lines]) => ({
    reads: Object.values(lines),
    chart: chart(title, Object.keys(lines), format, format === bytes || format === bytesPerSecond ? 1024 : 1000),
  }));
  const latency = latencyChart();
  const element = h(
    "div",
    {},
    h("h1", {}, "Overview"),
    h(
      "dl",
      { class: "figures" },
      figures.map(({ name, value }) => h("div", { class: "card" }, name, value)),
    ),
    h(
      "div",
      { class: "charts" },
      charts.map((each) => each.chart.element),
      latency.element,
    ),
  );
  const due = every(4000);

  async function refresh(status) {
    for (const { read, value } of figures) setText(value, read(status));
    for (const each of charts)
      each.chart.update(
        each.reads.map((read) => read(history)),
        Date.now(),
      );
    if (due()) await latency.load();
  }
  return { title: "Overview", element, refresh };
}

/** The 99th percentiles of the latencies, from /metrics; hidden while the broker measures none. */
function latencyChart() {
  const names = Object.keys(LATENCIES);
  const points = names.map(() => []);
  const drawing = chart("Latency, 99 % are below", Object.values(LATENCIES), milliseconds);
  drawing.element.hidden = true;
  let before = {};

  async function load() {
    const found = histograms(await metrics());
    const now = Date.now();
    names.forEach((name, index) => points[index].push([now, quantile(before[name], found[name], 0.99)]));
    if (points[0].length > POINTS) points.forEach((each) => each.shift());
    before = found;
    drawing.element.hidden = !names.some((name) => found[name]);
    drawing.update(points, now, 0.001);
  }
  return { element: drawing.element, load };
}
