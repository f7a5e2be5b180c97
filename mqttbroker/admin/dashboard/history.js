// The broker's samples of its recent past (GET /history), and what it told since.

import { get } from "./api.js";

const LIVE = 150; // answers of which the present values are kept, beside the samples
const SPANS = [5, 15, 60, 360, 1440, 10080]; // minutes that charts may show
const CLOSE = 1.5; // s between two points of a rate at least, so that each answer adds one

export class History {
  #times = []; // of the samples, in Unix seconds
  #series = new Map(); // name -> values of the samples, null = none
  #live = []; // { time, values }
  #interval = 0;
  #length = 0; // seconds that the broker keeps samples
  #asked = null; // the request that is not answered
  #span = null; // minutes that the user chose

  /** Asks for what is new, once at a time. */
  refresh() {
    this.#asked ??= this.#ask().finally(() => (this.#asked = null));
    return this.#asked;
  }

  async #ask() {
    const found = await get("/history", { since: this.#times.at(-1) });
    this.#interval = found.interval;
    this.#length = found.length;
    const names = new Set([...this.#series.keys(), ...Object.keys(found.series)]);
    for (const name of names) {
      const known = this.#series.get(name) ?? this.#times.map(() => null);
      this.#series.set(name, [...known, ...(found.series[name] ?? found.times.map(() => null))]);
    }
    this.#times.push(...found.times);
    const old = this.#times.findIndex((time) => time >= found.now - this.#length);
    const drop = old < 0 ? this.#times.length : old;
    this.#times.splice(0, drop);
    for (const values of this.#series.values()) values.splice(0, drop);
    this.#live.push({ time: found.now, values: found.values });
    if (this.#live.length > LIVE) this.#live.shift();
  }

  clear() {
    this.#times = [];
    this.#series.clear();
    this.#live = [];
  }

  /** The minutes that a chart can show: up to those that the broker keeps. */
  get spans() {
    return SPANS.filter((minutes, index) => index === 0 || SPANS[index - 1] * 60 < this.#length);
  }

  /** The minutes that charts show: those chosen, else as many as there are samples of, up to an hour. */
  get span() {
    const known = (this.now - (this.began ?? this.now)) / 60;
    const usual = this.spans.filter((minutes) => minutes <= 60);
    return this.#span ?? usual.find((minutes) => minutes >= known) ?? usual.at(-1);
  }

  set span(minutes) {
    this.#span = minutes;
  }

  /** The Unix time of the present values. */
  get now() {
    return this.#live.at(-1)?.time ?? Date.now() / 1000;
  }

  /** The Unix time of the first sample; null without any. */
  get began() {
    return this.#times[0] ?? null;
  }

  /** Points [Unix time, value] of a gauge; null = the broker was away, or there is no value. */
  gauge(name) {
    const samples = (this.#series.get(name) ?? []).map((value, index) => [this.#times[index], value]);
    const live = this.#live.filter(({ values }) => name in values).map(({ time, values }) => [time, values[name]]);
    const points = [...samples, ...live].sort(([one], [other]) => one - other);
    return points.flatMap(([time, value], index) => {
      const gap = index > 0 && time - points[index - 1][0] > 3 * this.#interval;
      return gap
        ? [
            [time, null],
            [time, value],
          ]
        : [[time, value]];
    });
  }

  /**
   * Points [Unix time, increase per second] of the sum of counters. One that fell is of a broker that was started again.
   */
  rate(...names) {
    const sums = names
      .map((name) => this.gauge(name))
      .reduce((sum, points) => points.map(([time, value], index) => [time, add(value, sum[index]?.[1])]));
    const rates = [];
    let before = null;
    for (const [time, value] of sums) {
      if (value === null) before = null;
      else if (before === null) before = [time, value];
      else if (time - before[0] >= CLOSE) {
        const increase = value - before[1];
        rates.push([time, increase < 0 ? null : increase / (time - before[0])]);
        before = [time, value];
      }
      if (value === null) rates.push([time, null]);
    }
    return rates;
  }
}

const add = (one, other) => (one === null || other == null ? null : one + other);
