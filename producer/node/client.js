// A session, from its producer's side: open, push, read replies, end, close, cancel.
//
//   const session = new Session(client, 'demo', 'cam-7');
//   await session.open();
//   const id = await session.push({ dtype: 'float32', shape: [1, 2], values });
//   await session.end();
//   for await (const reply of session.replies()) console.log(reply.id, reply.output);
//
// `client` is a connected client of the package `redis`; reconnecting is its own. The commands here
// are safe to repeat, and are repeated.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';

import { ErrorReply, RESP_TYPES } from 'redis';

import { CANCEL } from './cancel.js';
import { decode, decodeError, encode } from './codec.js';
import { keysOf, parseId } from './names.js';

const BINARY = { typeMapping: { [RESP_TYPES.BLOB_STRING]: Buffer } };
const ATTEMPTS = 5;
const PAUSE_MS = 200;

/** A session. One producer pushes into it, for the ids of its entries are numbered here. */
export class Session {
  #client;
  #last;
  #tail = Promise.resolve();

  /**
   * Name a session; nothing is sent yet.
   *
   * `partitions` is the app's, 1 unless it was started with more. `after` is the id of the last
   * entry already pushed, for a producer that goes on with a session another process began.
   */
  constructor(client, app, id, { partitions = 1, after = '0-0' } = {}) {
    this.#client = client;
    this.#last = after;
    parseId(after);
    this.id = id;
    this.keys = keysOf(app, id, partitions);
  }

  /**
   * Open the session, with a token, so that repeating it does nothing.
   *
   * `reuse` is for an id that was used before: it deletes what is left of the last session. Only
   * for one whose `end` has been read, and all of whose pushes have been answered.
   */
  async open({ token = randomUUID(), reuse = false } = {}) {
    if (reuse) await this.#repeat(() => this.#send(['DEL', this.keys.in, this.keys.out]));
    await this.#control('open', 'token', token);
    return token;
  }

  /** Push a frame `{ dtype, shape, values }`, or its bytes. Resolves to the id of its reply. */
  async push(frame, { reset = false, end = false } = {}) {
    const raw = frame instanceof Uint8Array ? frame : encode(frame);
    return this.#append([
      ...(reset ? ['op', 'reset'] : []),
      'frame',
      Buffer.from(raw.buffer, raw.byteOffset, raw.byteLength),
      ...(end ? ['end', '1'] : []),
    ]);
  }

  /** Return the session to rest, in order with its frames. */
  async reset() {
    return this.#append(['op', 'reset']);
  }

  /** End the session after everything pushed so far has been answered. */
  async end() {
    return this.#append(['end', '1']);
  }

  /** Close the session now; what waits is cancelled and counted in the last reply. */
  async close() {
    await this.#control('close');
  }

  /** Cancel one entry; false where it has been answered, or is not there. Not repeated. */
  async cancel(id) {
    parseId(id);
    const command = ['EVAL', CANCEL, '2', this.keys.slot, this.keys.in, id];
    return Number(await this.#send(command)) === 1;
  }

  /**
   * The replies after the id `after`, until the one with `end` has been read.
   *
   * Each is `{ id, output, error, op, worker, weights, end, reason, cancelled }`, without the
   * fields it does not have. Reading goes on where it was when the connection breaks. Throws
   * where nothing has come for `timeoutMs`.
   */
  async *replies({ after = '0-0', blockMs = 5000, timeoutMs = Infinity } = {}) {
    parseId(after);
    // A blocked connection can do nothing else, so reading has its own.
    const reader = this.#client.duplicate({ RESP: 2 });
    reader.on('error', () => {}); // it reconnects; silence ends with timeoutMs
    await reader.connect();
    try {
      let last = after;
      let since = Date.now();
      for (;;) {
        const left = Math.max(1, Math.min(blockMs, since + timeoutMs - Date.now()));
        const entries = await read(reader, this.keys.out, last, Math.ceil(left));
        if (entries.length === 0 && Date.now() - since >= timeoutMs) {
          throw new Error(`no reply of session ${this.id} after ${last} in ${timeoutMs} ms`);
        }
        for (const [id, fields] of entries) {
          const reply = replyOf(id.toString(), fields);
          last = reply.id;
          yield reply;
          since = Date.now();
          if (reply.end) return;
        }
      }
    } finally {
      reader.destroy();
    }
  }

  /**
   * Append an entry under an id of our own: Redis refuses to take the same one twice.
   *
   * "Equal or smaller" as the answer to a repetition means that the first try arrived, since no
   * later entry is sent before. An id is never used again, whatever happened.
   */
  #append(fields) {
    const id = (this.#last = `${parseId(this.#last)[0] + 1n}-0`);
    const sent = this.#tail.then(() => this.#add(id, fields));
    this.#tail = sent.catch(() => {}); // told to its own caller; the next one is tried all the same
    return sent;
  }

  async #add(id, fields) {
    await this.#repeat(async (attempt) => {
      try {
        await this.#send(['XADD', this.keys.in, id, ...fields]);
      } catch (error) {
        if (attempt > 1 && /equal or smaller/.test(error.message)) return;
        throw error;
      }
    });
    return id;
  }

  #control(op, ...more) {
    const message = ['op', op, 'session', this.id, ...more];
    return this.#repeat(() => this.#send(['XADD', this.keys.control, '*', ...message]));
  }

  #send(command) {
    return this.#client.sendCommand(command);
  }

  /** Repeat what was cut off; what Redis itself refused is thrown at once. */
  async #repeat(task) {
    for (let attempt = 1; ; attempt += 1) {
      try {
        return await task(attempt);
      } catch (error) {
        const final = error instanceof ErrorReply || error instanceof TypeError;
        if (final || attempt >= ATTEMPTS) throw error;
        await sleep(PAUSE_MS * attempt);
      }
    }
  }
}

async function read(reader, stream, last, blockMs) {
  const command = ['XREAD', 'COUNT', '100', 'BLOCK', `${blockMs}`, 'STREAMS', stream, last];
  try {
    const answer = await reader.sendCommand(command, BINARY);
    return answer ? answer[0][1] : [];
  } catch (error) {
    if (error instanceof ErrorReply || !reader.isOpen) throw error;
    await sleep(PAUSE_MS);
    return [];
  }
}

/** One reply from its entry. A field this protocol does not know is left out. */
export function replyOf(id, fields) {
  const reply = { id };
  for (let i = 0; i < fields.length; i += 2) {
    const [name, value] = [fields[i].toString(), fields[i + 1]];
    if (name === 'output') reply.output = decode(value);
    else if (name === 'error') reply.error = decodeError(value);
    else if (name === 'end') reply.end = true;
    else if (name === 'cancelled') reply.cancelled = Number(value.toString());
    else if (['op', 'worker', 'weights', 'reason'].includes(name)) reply[name] = value.toString();
  }
  return reply;
}
