// The latencies that the broker measures: the histograms of /metrics, between two answers.

const BUCKET = /^mqttbroker_(\w+)_seconds_bucket\{le="([^"]+)"\} (\S+)$/gm;

/**
 * The histograms in Prometheus' text format without other labels, by name: lists of [upper bound in seconds, count up
 * to it].
 */
export function histograms(text) {
  const found = {};
  for (const [, name, bound, count] of text.matchAll(BUCKET)) {
    (found[name] ??= []).push([bound === "+Inf" ? Infinity : Number(bound), Number(count)]);
  }
  return found;
}

/**
 * The quantile `q` of what was measured between two answers, in seconds, as far as the buckets tell: the upper bound of
 * its bucket, or the largest one that is finite. Null without a measurement, or if the broker was started again.
 */
export function quantile(before, after, q) {
  if (!before || !after) return null;
  const increase = after.map(([bound, count], index) => [bound, count - before[index][1]]);
  const total = increase.at(-1)[1];
  if (total <= 0) return null;
  const [bound] = increase.find(([, count]) => count >= q * total);
  return bound === Infinity ? increase.at(-2)[0] : bound;
}
