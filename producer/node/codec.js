// Frames as bytes and back. A frame is a msgpack map of `dtype`, `shape` and `data` (little-endian,
// C order); here it is `{ dtype, shape, values }`, with `values` a typed array, flat:
//
//   bool                     Uint8Array of 0 and 1
//   int8 ... uint64          Int8Array ... BigUint64Array
//   float32, float64         Float32Array, Float64Array
//   complex64, complex128    Float32Array, Float64Array: real, imaginary, real, ...
//   float16, bfloat16        Uint16Array of the bits: JavaScript has no such type
//   float8_*                 Uint8Array of the bits
//
// `toNumbers` and `fromNumbers` (floats.js) turn the bits into numbers and numbers into bits.

import { decode as unpack, encode as pack } from '@msgpack/msgpack';

import { FORMATS } from './floats.js';

const MAX_RANK = 16;
const FIELDS = ['dtype', 'shape', 'data'];

/** The longest frame read, in bytes, unless said otherwise; an app may allow less. */
export const MAX_FRAME_BYTES = 64 * 2 ** 20;

// Typed array of each dtype, and how many of its elements make one value.
const TYPES = new Map([
  ['bool', [Uint8Array, 1]],
  ['int8', [Int8Array, 1]],
  ['int16', [Int16Array, 1]],
  ['int32', [Int32Array, 1]],
  ['int64', [BigInt64Array, 1]],
  ['uint8', [Uint8Array, 1]],
  ['uint16', [Uint16Array, 1]],
  ['uint32', [Uint32Array, 1]],
  ['uint64', [BigUint64Array, 1]],
  ['float32', [Float32Array, 1]],
  ['float64', [Float64Array, 1]],
  ['complex64', [Float32Array, 2]],
  ['complex128', [Float64Array, 2]],
]);
for (const [name, format] of FORMATS) {
  TYPES.set(name, [format.bits === 8 ? Uint8Array : Uint16Array, 1]);
}

if (new Uint8Array(Uint16Array.of(1).buffer)[0] !== 1) {
  throw new Error('the wire is little-endian, and this machine is not');
}

/** Bytes that are no frame, or values that are none; `code` is the one of the protocol. */
export class BadFrame extends Error {
  constructor(code, message) {
    super(message);
    this.name = 'BadFrame';
    this.code = code;
  }
}

/** Typed array of a dtype, and its elements per value; throws `BadFrame` for an unknown name. */
function typeOf(dtype) {
  const type = TYPES.get(dtype);
  if (!type) {
    throw new BadFrame('dtype', `dtype is one of ${[...TYPES.keys()].join(', ')}; got ${dtype}`);
  }
  return type;
}

function sizeOf(shape) {
  return shape.reduce((size, axis) => size * axis, 1);
}

/** Encode `{ dtype, shape, values }`; throws `BadFrame` where the values are not of the dtype. */
export function encode({ dtype, shape, values }) {
  const [Type, width] = typeOf(dtype);
  if (!(values instanceof Type)) {
    throw new BadFrame('data', `values of ${dtype} are a ${Type.name}, or see fromNumbers`);
  }
  if (values.length !== sizeOf(shape) * width) {
    throw new BadFrame(
      'shape',
      `${dtype}[${shape}] takes ${sizeOf(shape) * width} elements, got ${values.length}`,
    );
  }
  const data = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  return pack({ dtype, shape: [...shape], data });
}

/**
 * Decode one array, or (several outputs) an object of name to array.
 *
 * Throws `BadFrame`. The arrays do not share memory with `raw`.
 */
export function decode(raw, { maxBytes = MAX_FRAME_BYTES } = {}) {
  if (raw.length > maxBytes) {
    throw new BadFrame('too_large', `a frame is at most ${maxBytes} bytes, got ${raw.length}`);
  }
  const value = unpackMap(raw, maxBytes);
  const parts = isMap(value) ? Object.entries(value) : [];
  if (parts.length > 0 && parts.every(([, part]) => isMap(part))) {
    return Object.fromEntries(parts.map(([name, part]) => [name, arrayOf(part)]));
  }
  return arrayOf(value);
}

/** The `code` and `message` of an `error` reply. */
export function decodeError(raw) {
  const { code, message } = unpackMap(raw, MAX_FRAME_BYTES);
  return { code, message };
}

function unpackMap(raw, maxBytes) {
  try {
    return unpack(raw, {
      maxStrLength: 2 ** 16,
      maxBinLength: maxBytes,
      maxArrayLength: 1024,
      maxMapLength: 1024,
      maxExtLength: 0,
      mapKeyConverter: keyOf,
    });
  } catch (error) {
    throw new BadFrame('not_msgpack', `not valid msgpack (${error.message})`);
  }
}

function keyOf(key) {
  if (typeof key === 'string') return key;
  if (key instanceof Uint8Array) return `bytes ${[...key]}`;
  throw new TypeError(`a key is text, got a ${typeof key}`);
}

function isMap(value) {
  return typeof value === 'object' && value !== null && value.constructor === Object;
}

function arrayOf(value) {
  if (!isMap(value)) throw new BadFrame('not_a_map', 'a frame is a map of dtype, shape and data');
  const missing = FIELDS.filter((field) => !Object.hasOwn(value, field));
  if (missing.length) throw new BadFrame('missing_field', `the map lacks ${missing}`);
  const extra = Object.keys(value).filter((key) => !FIELDS.includes(key));
  if (extra.length) throw new BadFrame('unknown_field', `the map also has ${extra}`);
  const { dtype, shape, data } = value;
  if (typeof dtype !== 'string') throw new BadFrame('dtype', "dtype is a name such as 'float32'");
  if (!Array.isArray(shape) || !shape.every((axis) => Number.isInteger(axis) && axis >= 0)) {
    throw new BadFrame('shape', 'shape is a list of whole numbers, 0 or more');
  }
  if (shape.length > MAX_RANK) {
    throw new BadFrame('shape', `shape has at most ${MAX_RANK} axes, got ${shape.length}`);
  }
  if (!(data instanceof Uint8Array)) throw new BadFrame('data', 'data is msgpack bin (bytes)');
  const [Type, width] = typeOf(dtype);
  const expected = sizeOf(shape) * width * Type.BYTES_PER_ELEMENT;
  if (data.length !== expected) {
    throw new BadFrame(
      'byte_count',
      `${dtype}[${shape}] takes ${expected} bytes of data, got ${data.length}`,
    );
  }
  if (sizeOf(shape.filter((axis) => axis > 0)) > Number.MAX_SAFE_INTEGER) {
    throw new BadFrame('shape', `the axes [${shape}] are too long, though one of them is 0`);
  }
  const values = new Type(new Uint8Array(data).buffer); // copied: a view need not be aligned
  return { dtype, shape, values };
}
