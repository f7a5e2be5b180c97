// Requests to the broker's API. The token is in sessionStorage, which ends with the tab, and never in a URL.

const TOKEN = "mqttbroker-token";
const TIMEOUT = 15000; // ms

/** A request that was refused (`status`), or had no answer (status 0). */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
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
  if (!response.ok) throw new ApiError(response.status, answer?.detail ?? response.statusText);
  return answer;
}

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
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  try {
    const response = await fetch(url, {
      method,
      headers,
      body: body && JSON.stringify(body),
      cache: "no-store",
      redirect: "error",
      signal: AbortSignal.timeout(TIMEOUT),
    });
    return { response, text: await response.text() };
  } catch (error) {
    const reason = error.name === "TimeoutError" ? `no answer in ${TIMEOUT / 1000} s` : "no connection to the broker";
    throw new ApiError(0, reason);
  }
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
