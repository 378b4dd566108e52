// node --test; with SLOTSTREAM_TEST_REDIS=redis://... of an empty Redis also the round trips.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import net from 'node:net';
import { test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { RESP_TYPES, createClient } from 'redis';

import { CANCEL } from './cancel.js';
import { Session, replyOf } from './client.js';
import { BadFrame, decode, decodeError, encode } from './codec.js';
import { FORMATS, fromNumbers, toNumbers } from './floats.js';
import * as names from './names.js';

const text = (path) => readFileSync(new URL(path, import.meta.url), 'ascii');
const vectors = JSON.parse(text('../vectors.json'));
const bytes = (hex) => Buffer.from(hex, 'hex');
const hex = (a) => Buffer.from(a.buffer, a.byteOffset, a.byteLength).toString('hex');

/** A value as the vectors write it. */
function written(value) {
  if (Array.isArray(value)) return value.map(written);
  if (typeof value === 'bigint') return value.toString();
  if (typeof value === 'boolean' || Number.isFinite(value)) return value;
  return { NaN: 'nan', Infinity: 'inf', '-Infinity': '-inf' }[value];
}

function same(array, item) {
  assert.equal(array.dtype, item.dtype);
  assert.deepEqual(array.shape, item.shape);
  assert.equal(hex(array.values), item.data);
  assert.deepStrictEqual(toNumbers(array).map(written), item.values); // tells -0 from 0
}

test('frames decode to their values and encode to their bytes', () => {
  for (const item of vectors.frames) {
    same(decode(bytes(item.raw)), item);
    assert.equal(hex(encode(decode(bytes(item.raw)))), item.raw, item.name);
  }
  assert.equal(new Set(vectors.frames.map((item) => item.dtype)).size, 23);
});

test('numbers become the bits they are nearest to', () => {
  for (const item of vectors.frames.filter(({ dtype }) => FORMATS.has(dtype))) {
    const array = decode(bytes(item.raw));
    const bits = fromNumbers(item.dtype, toNumbers(array));
    bits.forEach((code, i) => item.values[i] === 'nan' || assert.equal(code, array.values[i]));
  }
  const nearest = [1 + 2 ** -9, 1 + 3 * 2 ** -9, 1 + 2 ** -9 + 2 ** -20, 3.4e38, -1e-45];
  assert.deepEqual([...fromNumbers('bfloat16', [...nearest, 3.4e39])], [
    0x3f80, 0x3f81, 0x3f80, 0x7f80, 0x8000, 0x7f80,
  ]);
  assert.throws(() => fromNumbers('float8_e4m3fn', [1000]), RangeError);
  assert.throws(() => fromNumbers('float32', [1]), RangeError);
});

test('several outputs decode by name', () => {
  for (const item of vectors.outputs) {
    const outputs = decode(bytes(item.raw));
    assert.deepEqual(Object.keys(outputs), Object.keys(item.outputs));
    for (const [name, output] of Object.entries(outputs)) same(output, item.outputs[name]);
  }
});

test('other valid encodings are read too', () => {
  for (const item of vectors.also_valid) {
    same(decode(bytes(item.raw)), item);
    assert.equal(hex(encode(decode(bytes(item.raw)))), item.usual, item.name);
  }
});

test('bytes that are no frame are refused with their code', () => {
  for (const item of vectors.invalid) {
    assert.throws(
      () => decode(bytes(item.raw), { maxBytes: item.max_bytes }),
      (error) => error instanceof BadFrame && error.code === item.code,
      item.name,
    );
  }
});

test('values that are not of the dtype are not encoded', () => {
  const refused = (frame) => assert.throws(() => encode(frame), BadFrame);
  refused({ dtype: 'float32', shape: [1], values: Float64Array.of(1) });
  refused({ dtype: 'float32', shape: [2], values: Float32Array.of(1) });
  refused({ dtype: 'float', shape: [1], values: Float32Array.of(1) });
});

test('a long frame survives, also from the middle of a buffer', () => {
  const values = Float32Array.from({ length: 70000 }, (_, i) => i).subarray(1);
  const array = decode(encode({ dtype: 'float32', shape: [69999], values }));
  assert.deepEqual(array.values, values);
});

test('an error reply is a map of code and message', () => {
  for (const { code, message, raw } of vectors.errors) {
    assert.deepEqual(decodeError(bytes(raw)), { code, message });
  }
});

test('ids sort as Redis sorts them', () => {
  const { order, next, short, invalid } = vectors.ids;
  assert.deepEqual([...order].reverse().sort(names.compareIds), order);
  for (const [first, second] of next) assert.equal(names.nextId(first), second);
  for (const [id, full] of short) assert.equal(names.compareIds(id, full), 0);
  for (const id of invalid) assert.throws(() => names.parseId(id), RangeError, id);
});

test('names are taken or refused', () => {
  const checks = { app: names.checkApp, session: names.checkSession };
  for (const [kind, { valid, invalid }] of Object.entries(vectors.names)) {
    for (const name of valid) assert.equal(checks[kind](name), name);
    for (const name of invalid) assert.throws(() => checks[kind](name), RangeError, name);
  }
});

test('a session is in the partition of its stem, and its keys say so', () => {
  assert.equal(names.crc16('123456789'), 0x31c3);
  for (const { session, partitions, partition } of vectors.partitions) {
    assert.equal(names.partitionOf(session, partitions), partition);
    assert.ok(names.keysOf('demo', session, partitions).in.startsWith(`{demo:${partition}}:in:`));
  }
  for (const { app, session, partitions, keys } of vectors.keys) {
    const ours = names.keysOf(app, session, partitions);
    for (const [name, key] of Object.entries(ours)) assert.equal(key, keys[name]);
  }
});

test('the cancel script is the published one', () => {
  assert.equal(CANCEL.trim(), text('../slotstream/cancel.lua').trim());
});

test('a field that a later protocol adds is left alone', () => {
  assert.deepEqual(replyOf('1-0', ['op', 'reset', 'later', 'x'].map((s) => Buffer.from(s))), {
    id: '1-0',
    op: 'reset',
  });
});

const url = process.env.SLOTSTREAM_TEST_REDIS;
const onRedis = { skip: url ? false : 'SLOTSTREAM_TEST_REDIS is not set', timeout: 30000 };

async function connected(at, body) {
  const client = createClient({ url: at });
  client.on('error', () => {});
  await client.connect();
  try {
    await body(client);
  } finally {
    client.destroy();
  }
}

test('what is pushed stands in Redis, and what is answered is read', onRedis, () =>
  connected(url, async (client) => {
    const { app, in: pushed, out } = vectors.session;
    const session = new Session(client, 'node', 'a/1');
    await session.open({ token: 't1' });
    const values = Float32Array.of(1, 2);
    const first = await session.push({ ...app, values });
    const second = await session.push({ ...app, values }, { reset: true });
    const third = await session.push({ ...app, values });
    assert.equal(await session.cancel(third), true);
    assert.equal(await session.cancel(third), false);
    await session.end();
    await session.close();

    assert.deepEqual([first, second, third], ['1-0', '2-0', '3-0']);
    const told = await client.xRange(session.keys.control, '-', '+');
    assert.deepEqual(
      told.map(({ message }) => ({ ...message })),
      [
        { op: 'open', session: 'a/1', token: 't1' },
        { op: 'close', session: 'a/1' },
      ],
    );
    const typeMapping = { [RESP_TYPES.BLOB_STRING]: Buffer };
    const range = ['XRANGE', session.keys.in, '-', '+'];
    const entries = await client.sendCommand(range, { typeMapping });
    assert.deepEqual(
      entries.map(([id, fields]) => [`${id}`, fields.map(String).filter((_, i) => i % 2 === 0)]),
      [['1-0', ['frame']], ['2-0', ['op', 'frame']], ['4-0', ['end']]],
    );
    assert.equal(entries[0][1][1].toString('hex'), pushed[0][1].frame);

    const reading = (async () => {
      const replies = [];
      for await (const reply of session.replies({ blockMs: 100 })) replies.push(reply);
      return replies;
    })();
    for (const [id, fields] of out) {
      const flat = Object.entries(fields).flatMap(([name, value]) => [name, bytes(value)]);
      await client.sendCommand(['XADD', session.keys.out, id, ...flat]);
    }
    const replies = await reading;
    assert.deepEqual(replies.map((reply) => reply.id), out.map(([id]) => id));
    assert.deepEqual([...replies[2].output.values], [1.5, 0]);
    assert.equal(replies[4].error.code, 'shape');
    const [{ output, ...last }, weights] = [replies.at(-1), '3f9a61c20b7e'];
    assert.deepEqual(last, { id: '10-0', weights, end: true, reason: 'end', cancelled: 1 });
  }));

test('silence ends with the timeout, and leaving the loop ends the reading', onRedis, () =>
  connected(url, async (client) => {
    const session = new Session(client, 'node', 'quiet');
    const wait = session.replies({ blockMs: 20, timeoutMs: 60 });
    await assert.rejects(() => wait.next(), /no reply of session quiet after 0-0 in 60 ms/);
    await client.xAdd(session.keys.out, '0-1', { op: 'opened', worker: 'w.1' });
    for await (const reply of session.replies()) {
      assert.deepEqual(reply, { id: '0-1', op: 'opened', worker: 'w.1' });
      break;
    }
  }));

test('a push that is cut off arrives once, those behind it in order', onRedis, async () => {
  const { hostname, port } = new URL(url);
  let cut = ''; // what the proxy drops next: a command on its way, or the answer to it
  const proxy = net.createServer((near) => {
    const far = net.connect(Number(port), hostname);
    const pass = (what, from, to) =>
      from.on('data', (data) => {
        if (cut !== what) to.write(data);
        else [cut] = ['', near.destroy()];
      });
    for (const socket of [near, far]) socket.on('error', () => {});
    pass('command', near.on('close', () => far.destroy()), far);
    pass('answer', far.on('close', () => near.destroy()), near);
  });
  await new Promise((done) => proxy.listen(0, '127.0.0.1', done));
  try {
    await connected(`redis://127.0.0.1:${proxy.address().port}`, async (client) => {
      for (const what of ['command', 'answer']) {
        const session = new Session(client, 'node', what);
        cut = what;
        const first = session.push(Uint8Array.of(1));
        await sleep(20);
        const ids = await Promise.all([first, session.push(Uint8Array.of(2))]);
        assert.equal(cut, '');
        const entries = await client.xRange(session.keys.in, '-', '+');
        assert.deepEqual(entries.map(({ id }) => id), ids);
      }
      await assert.rejects(new Session(client, 'node', 'answer').push(Uint8Array.of(9)), /smaller/);
    });
  } finally {
    proxy.close();
  }
});
