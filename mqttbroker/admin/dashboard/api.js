// Requests to the broker's API. The token is in sessionStorage, which ends with the tab, and never in a URL.

const TOKEN = "mqttbroker-token";
const TIMEOUT = 15000; // ms
export const LONGEST = 2000; // characters of a client id or topic in an address

/**
 * A request that was refused (`status`), or had no answer (status 0); `field` names the parameter or key that is wrong.
 */
export class ApiError extends Error {
  constructor(status, message, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }

  /** Whether it is no matter of the request: the token or the connection is gone. */
  get general() {
    return [0, 401, 503].includes(this.status);
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  clear: () => sessionStorage.removeItem(TOKEN),
};

/** The JSON of an answer; null of an empty one. `query` values that are null or "" are left out. */
export async function ask(method, path, query = {}, body = null) {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  const { response, text } = await send(method, `/api/v1${path}${search}`, body);
  const answer = text ? parse(text) : null;
  if (!response.ok) throw refused(response, answer);
  return answer;
}

/** The lines of an answer as they come, until it ends or `signal` aborts it. */
export async function* lines(path, query, signal) {
  const response = await request("GET", `/api/v1${path}?${new URLSearchParams(query)}`, null, signal);
  if (!response.ok) throw refused(response, parse(await response.text()));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const found = (rest + part.value).split("\n");
      rest = found.pop();
      yield* found;
    }
  } catch (error) {
    if (!signal.aborted) throw unanswered(error);
  }
}

const refused = (response, problem) =>
  new ApiError(response.status, problem?.detail ?? response.statusText, problem?.field);

export const get = (path, query) => ask("GET", path, query);

/** What /readyz says: `reasons` why clients should not connect, and `warnings`. */
export async function readiness() {
  const { response, text } = await send("GET", "/readyz", null);
  if (!response.ok && response.status !== 503) throw new ApiError(response.status, response.statusText);
  return parse(text) ?? {};
}

/** A client id, stream or other text as one segment of a path. */
export const segment = encodeURIComponent;

async function send(method, url, body) {
  const response = await request(method, url, body, AbortSignal.timeout(TIMEOUT));
  try {
    return { response, text: await response.text() };
  } catch (error) {
    throw unanswered(error);
  }
}

async function request(method, url, body, signal) {
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  try {
    const options = { method, headers, body: body && JSON.stringify(body), signal };
    return await fetch(url, { ...options, cache: "no-store", redirect: "error" });
  } catch (error) {
    throw unanswered(error);
  }
}

function unanswered(error) {
  const reason = error.name === "TimeoutError" ? `no answer in ${TIMEOUT / 1000} s` : "no connection to the broker";
  return new ApiError(0, reason);
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
