// The part of MQTT 5.0 that a viewer of messages needs, over WebSocket: CONNECT, one subscription at QoS 0, and
// incoming messages. Sections are those of the standard.

const MAX_PACKET = 1 << 20; // bytes; the broker sends no longer message (section 3.1.2.11.4)
const KEEP_ALIVE = 30; // seconds
const LONGEST = 65535; // bytes of a UTF-8 string (section 1.5.4)
const REASONS = {
  0x81: "malformed packet",
  0x82: "protocol error",
  0x84: "protocol version not supported",
  0x85: "client id not valid",
  0x86: "bad user name or password",
  0x87: "not authorized",
  0x88: "server unavailable",
  0x89: "server busy",
  0x8a: "banned",
  0x8b: "server shutting down",
  0x8d: "keep alive timeout",
  0x8e: "session taken over",
  0x8f: "topic filter not valid",
  0x95: "packet too large",
  0x97: "quota exceeded",
  0x98: "disconnected by an operator",
  0x9c: "use another server",
  0x9d: "server moved",
  0x9f: "connection rate exceeded",
};
// What the broker says in a DISCONNECT of a packet of this page, so it would say it at every try.
const FINAL = new Set([0x81, 0x82, 0x8f, 0x95, 0x9e, 0xa1, 0xa2]);
const reason = (code) => REASONS[code] ?? `reason code 0x${code.toString(16)}`;

/** The readers of property values by identifier (section 2.2.2.2), for properties that PUBLISH may have. */
const PROPERTIES = {
  0x01: (reader) => ["payloadFormat", reader.byte()],
  0x02: (reader) => ["expiry", reader.number(4)],
  0x03: (reader) => ["contentType", reader.text()],
  0x08: (reader) => ["responseTopic", reader.text()],
  0x09: (reader) => ["correlation", reader.binary()],
  0x0b: (reader) => ["subscription", reader.variable()],
  0x23: (reader) => ["alias", reader.number(2)],
  0x26: (reader) => ["user", [reader.text(), reader.text()]],
};

/**
 * Subscribes to a filter. Calls `opened()` after SUBACK, `received({ topic, payload, qos, retain, properties })` for
 * each message, and once `ended(reason, final)`, where a final end would be the same at another try.
 */
export class Subscription {
  #socket;
  #unread = new Uint8Array(0);
  #timer = 0;
  #subscription = false; // whether there is one
  #calls;

  constructor(url, { username, password, filter }, calls) {
    this.#calls = calls;
    if (new TextEncoder().encode(filter).length > LONGEST) throw new Error(`A topic filter has at most ${LONGEST} bytes.`);
    this.#socket = new WebSocket(url, ["mqtt"]);
    this.#socket.binaryType = "arraybuffer";
    this.#socket.onopen = () => this.#socket.send(connect(username, password));
    this.#socket.onmessage = ({ data }) => this.#read(new Uint8Array(data), filter);
    this.#socket.onclose = () => this.#end("no connection to the listener", false);
  }

  close() {
    this.#calls = null;
    clearInterval(this.#timer);
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(packet(0xe0, []));
    this.#socket.close();
  }

  #end(text, final) {
    const calls = this.#calls;
    this.close();
    calls?.ended(text, final);
  }

  #read(data, filter) {
    const joined = this.#unread.length ? concat([this.#unread, data]) : data;
    let start = 0;
    try {
      for (let found = packetAt(joined, start); found && this.#calls; found = packetAt(joined, start)) {
        this.#handle(
          joined[start] >> 4,
          joined[start] & 15,
          new Reader(joined.subarray(found.body, found.end)),
          filter,
        );
        start = found.end;
      }
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      this.#end("the listener sent something that is not MQTT", true);
    }
    this.#unread = joined.slice(start);
  }

  #handle(type, flags, reader, filter) {
    if (type === 2)
      this.#connected(reader.skip(1).byte(), filter); // CONNACK
    else if (type === 9)
      this.#subscribed(reader.skip(2).skipProperties().byte()); // SUBACK
    else if (type === 3)
      this.#calls.received(message(flags, reader)); // PUBLISH
    else if (type === 14) this.#disconnected(reader.left ? reader.byte() : 0); // DISCONNECT
  }

  #connected(code, filter) {
    if (code) return this.#end(reason(code), code < 0x88 || code === 0x8a);
    this.#timer = setInterval(() => this.#socket.send(packet(0xc0, [])), KEEP_ALIVE * 500);
    // Packet identifier 1, no properties, the filter at QoS 0: the broker keeps no message for a page that does not
    // read.
    this.#socket.send(packet(0x82, [[0, 1, 0], text(filter), [0]]));
  }

  #disconnected(code) {
    if (FINAL.has(code) && !this.#subscription) this.#end(`the broker refuses the topic filter: ${reason(code)}`, true);
    else this.#end(reason(code), FINAL.has(code));
  }

  #subscribed(code) {
    if (code >= 0x80) this.#end(reason(code), true);
    else {
      this.#subscription = true;
      this.#calls.opened();
    }
  }
}

// --- packets -------------------------------------------------------------------------------------------------------

/** CONNECT with Clean Start (section 3.1), and a client id of its own for each page. */
function connect(username, password) {
  const flags = 0x02 | (username ? 0x80 : 0) | (password ? 0x40 : 0);
  const properties = [0x27, ...bigEndian(MAX_PACKET, 4)];
  const id = `dashboard-${Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(36)).join("")}`;
  const parts = [text("MQTT"), [5, flags], bigEndian(KEEP_ALIVE, 2), [properties.length], properties, text(id)];
  if (username) parts.push(text(username));
  if (password) parts.push(text(password));
  return packet(0x10, parts);
}

/** An incoming PUBLISH (section 3.3). */
function message(flags, reader) {
  const topic = reader.text();
  const qos = (flags >> 1) & 3;
  if (qos) reader.skip(2);
  const properties = [];
  for (const section = reader.section(reader.variable()); section.left;) {
    const read = PROPERTIES[section.variable()];
    if (!read) throw new RangeError("unknown property");
    properties.push(read(section));
  }
  return { topic, qos, retain: Boolean(flags & 1), properties, payload: reader.rest() };
}

function packet(first, parts) {
  const body = concat(parts);
  const length = [];
  let left = body.length;
  do {
    length.push((left & 127) | (left > 127 ? 128 : 0));
    left >>= 7;
  } while (left);
  return concat([[first], length, body]);
}

/** Where the packet that begins at `start` has its body and its end; null if it is not complete. */
function packetAt(data, start) {
  let length = 0;
  for (let index = 1; index <= 4; index++) {
    const byte = data[start + index];
    if (byte === undefined) return null;
    length += (byte & 127) * 128 ** (index - 1);
    if (byte < 128) {
      const body = start + index + 1;
      return body + length <= data.length ? { body, end: body + length } : null;
    }
  }
  throw new RangeError("Remaining Length");
}

const bigEndian = (value, size) =>
  Array.from({ length: size }, (_, index) => (value >>> (8 * (size - 1 - index))) & 255);

function text(value) {
  const encoded = new TextEncoder().encode(value);
  return concat([bigEndian(encoded.length, 2), encoded]);
}

function concat(parts) {
  const joined = new Uint8Array(parts.reduce((total, part) => total + part.length, 0));
  let place = 0;
  for (const part of parts) {
    joined.set(part, place);
    place += part.length;
  }
  return joined;
}

/** Reads the data types of section 1.5; RangeError past the end. */
class Reader {
  #data;
  #place = 0;

  constructor(data) {
    this.#data = data;
  }

  get left() {
    return this.#data.length - this.#place;
  }

  take(length) {
    if (length > this.left) throw new RangeError("packet too short");
    this.#place += length;
    return this.#data.subarray(this.#place - length, this.#place);
  }

  skip(length) {
    this.take(length);
    return this;
  }

  skipProperties() {
    return this.skip(this.variable());
  }

  section = (length) => new Reader(this.take(length));
  rest = () => this.take(this.left).slice();
  byte = () => this.take(1)[0];
  number = (size) => this.take(size).reduce((value, byte) => value * 256 + byte, 0);
  binary = () => this.take(this.number(2));
  text = () => new TextDecoder().decode(this.binary());

  variable() {
    let value = 0;
    for (let shift = 0; shift < 28; shift += 7) {
      const byte = this.byte();
      value += (byte & 127) * 2 ** shift;
      if (byte < 128) return value;
    }
    throw new RangeError("Variable Byte Integer");
  }
}
