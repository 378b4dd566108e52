// Names, keys, partitions and ids: what things are called in Redis. See ../PROTOCOL.md.

const APP = /^[a-z0-9_-]{1,64}$/;
const SESSION = /^[A-Za-z0-9._:/-]{1,128}$/;
const ID = /^(\d{1,20})(?:-(\d{1,20}))?$/;
const TOP = 2n ** 64n - 1n;

/** Return `app` where it is a valid name of an app, else throw a RangeError. */
export function checkApp(app) {
  if (typeof app !== 'string' || !APP.test(app)) {
    throw new RangeError(`an app's name is 1 to 64 of a-z 0-9 _ -, got ${JSON.stringify(app)}`);
  }
  return app;
}

/** Return `session` where it is a valid session id, else throw a RangeError. */
export function checkSession(session) {
  if (typeof session !== 'string' || !SESSION.test(session)) {
    throw new RangeError(
      `a session's id is 1 to 128 of A-Z a-z 0-9 . _ : / -, got ${JSON.stringify(session)}`,
    );
  }
  return session;
}

/** CRC16 as in Redis Cluster (XMODEM: polynomial 0x1021, start 0) of an ASCII text. */
export function crc16(text) {
  let crc = 0;
  for (let i = 0; i < text.length; i += 1) {
    crc ^= text.charCodeAt(i) << 8;
    for (let bit = 0; bit < 8; bit += 1) {
      crc = ((crc << 1) ^ (crc & 0x8000 ? 0x1021 : 0)) & 0xffff;
    }
  }
  return crc;
}

/** Partition of a session: CRC16 of its id up to the first `/`, modulo `partitions`. */
export function partitionOf(session, partitions = 1) {
  return crc16(session.split('/', 1)[0]) % partitions;
}

/** The keys a producer uses for one session. `config` is the app's. */
export function keysOf(app, session, partitions = 1) {
  checkApp(app);
  checkSession(session);
  const prefix = `{${app}:${partitionOf(session, partitions)}}:`;
  return {
    config: `${app}:config`,
    control: `${prefix}control`,
    in: `${prefix}in:${session}`,
    out: `${prefix}out:${session}`,
    slot: `${prefix}slot:${session}`,
  };
}

/** An entry's id as two BigInts, `[milliseconds, sequence]`. */
export function parseId(text) {
  const match = ID.exec(text);
  const parts = match ? [BigInt(match[1]), BigInt(match[2] ?? 0)] : [];
  if (!match || parts[0] > TOP || parts[1] > TOP) {
    throw new RangeError(`an entry's id is two numbers, as in 1526919030474-0; got ${text}`);
  }
  return parts;
}

/** Order of two ids as in Redis: below 0, 0 or above 0. As text, `9-0` would follow `10-0`. */
export function compareIds(a, b) {
  const [left, right] = [parseId(a), parseId(b)];
  const at = left[0] === right[0] ? 1 : 0;
  return left[at] < right[at] ? -1 : Number(left[at] > right[at]);
}

/** The smallest id after `text`. */
export function nextId(text) {
  const [ms, seq] = parseId(text);
  return seq < TOP ? `${ms}-${seq + 1n}` : `${ms + 1n}-0`;
}
