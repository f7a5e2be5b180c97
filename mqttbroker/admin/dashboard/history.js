// The broker's counters and gauges since the page was opened: one sample for each answer of /status.

const SAMPLES = 300;

export class History {
  #samples = []; // { time: ms, status }

  add(time, status) {
    this.#samples.push({ time, status });
    if (this.#samples.length > SAMPLES) this.#samples.shift();
  }

  clear() {
    this.#samples = [];
  }

  /** Points [time, value] of a gauge; `read` takes it from a status. */
  gauge(read) {
    return this.#samples.map(({ time, status }) => [time, read(status)]);
  }

  /**
   * Points [time, increase per second] of a counter. A counter that fell belongs to a broker that was started again.
   */
  rate(read) {
    return this.#samples.slice(1).map(({ time, status }, index) => {
      const before = this.#samples[index];
      const increase = read(status) - read(before.status);
      return [time, increase < 0 ? null : (increase * 1000) / (time - before.time)];
    });
  }
}
