// Numbers, sizes, times and payloads as text.

const NUMBER = new Intl.NumberFormat("en");
const SMALL = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

// Control characters but tab and line feed, and those that change the direction of the text that follows.
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g;

/** A text in which such a character is seen: \\u202e */
export const visible = (text) =>
  text.replace(HIDDEN, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** The first characters of a long text, and how many there are. */
export function brief(text, limit = 200) {
  if (text.length <= limit) return text;
  // A surrogate pair is not split.
  return `${text.slice(0, limit).replace(/[\ud800-\udbff]$/, "")}… (${count(text.length)} characters)`;
}

/** A topic, client id or name in a question or notice. */
export const named = (text) => `“${visible(brief(text))}”`;

/** 12,345 */
export const count = (value) => NUMBER.format(value);

/** 12.3K; below 100 with two decimals */
export const short = (value) => (Math.abs(value) < 100 ? SMALL : COMPACT).format(value);

/** 1.5 MiB */
export function bytes(value) {
  const unit = value < 1024 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), UNITS.length - 1);
  return `${SMALL.format(value / 1024 ** unit)} ${UNITS[unit]}`;
}

/** 2.5 ms, of seconds */
export const milliseconds = (seconds) => `${short(seconds * 1000)} ms`;

const DURATIONS = Object.entries({ d: 86400, h: 3600, min: 60, s: 1 });

/** 3 h 20 min, of seconds */
export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  const first = DURATIONS.findIndex(([, size]) => seconds >= size);
  const [[unit, size], finer] = DURATIONS.slice(first, first + 2);
  const rest = finer ? Math.floor((seconds % size) / finer[1]) : 0;
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${finer[0]}` : ""}`;
}

/** 2026-01-31 13:05:07, in the time zone of the browser; of Unix seconds */
export function time(seconds) {
  const date = new Date(seconds * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const day = [date.getFullYear(), two(date.getMonth() + 1), two(date.getDate())].join("-");
  return `${day} ${clock(date)}`;
}

/** 13:05:07 */
export const clock = (date) => date.toTimeString().slice(0, 8);

/** A payload as text if it is UTF-8, else in hexadecimal; at most `limit` characters. */
export function payload(data, limit = 2000) {
  const cut = data.subarray(0, limit);
  let text;
  try {
    // A cut may split a character, so the decoder is told that more follows.
    text = new TextDecoder("utf-8", { fatal: true }).decode(cut, { stream: cut.length < data.length });
    if (/[\0-\x08\x0e-\x1f\x7f]/.test(text)) throw new TypeError("control characters");
  } catch {
    text = Array.from(cut.subarray(0, limit / 3), (byte) => byte.toString(16).padStart(2, "0")).join(" ");
    if (cut.length > limit / 3) return `${text} …`;
  }
  return cut.length < data.length ? `${text}…` : text;
}

/** The bytes of base64. */
export const fromBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
