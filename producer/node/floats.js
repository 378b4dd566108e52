// Floats that JavaScript has no typed array for: their bits as numbers, and numbers as bits.

/** Formats by name: bits in all, of the exponent, of the mantissa; bias; codes of not-numbers. */
export const FORMATS = new Map(
  [
    ['float16', 16, 5, 10, 15, 'ieee'],
    ['bfloat16', 16, 8, 7, 127, 'ieee'],
    ['float8_e3m4', 8, 3, 4, 3, 'ieee'],
    ['float8_e4m3', 8, 4, 3, 7, 'ieee'],
    ['float8_e4m3b11fnuz', 8, 4, 3, 11, 'fnuz'], // -0 is nan, there is no infinity
    ['float8_e4m3fn', 8, 4, 3, 7, 'fn'], // all ones are nan, there is no infinity
    ['float8_e4m3fnuz', 8, 4, 3, 8, 'fnuz'],
    ['float8_e5m2', 8, 5, 2, 15, 'ieee'],
    ['float8_e5m2fnuz', 8, 5, 2, 16, 'fnuz'],
    ['float8_e8m0fnu', 8, 8, 0, 127, 'powers'], // powers of two: no sign, no zero
  ].map(([name, bits, exponent, mantissa, bias, kind]) => [
    name,
    { bits, exponent, mantissa, bias, kind },
  ]),
);

const tables = new Map();

function valueOf(code, { exponent, mantissa, bias, kind }) {
  if (kind === 'powers') return code === 255 ? NaN : 2 ** (code - bias);
  const top = 2 ** exponent - 1;
  const negative = code >> (exponent + mantissa);
  const power = (code >> mantissa) & top;
  const digits = code & (2 ** mantissa - 1);
  if (kind === 'ieee' && power === top) return digits ? NaN : negative ? -Infinity : Infinity;
  if (kind === 'fn' && power === top && digits === 2 ** mantissa - 1) return NaN;
  if (kind === 'fnuz' && negative && !power && !digits) return NaN;
  const whole = digits + (power ? 2 ** mantissa : 0);
  const value = whole * 2 ** (Math.max(power, 1) - bias - mantissa);
  return negative ? -value : value;
}

/** The value of every code of a format. */
function tableOf(dtype) {
  if (!tables.has(dtype)) {
    const format = FORMATS.get(dtype);
    const codes = { length: 2 ** format.bits };
    tables.set(dtype, Float64Array.from(codes, (_, code) => valueOf(code, format)));
  }
  return tables.get(dtype);
}

/** Code of the number nearest to `value`; of two equally near, the even one. */
function codeOf(value, dtype, table) {
  const { exponent, mantissa, kind } = FORMATS.get(dtype);
  if (Number.isNaN(value)) return table.findIndex(Number.isNaN);
  const negative = kind !== 'powers' && (value < 0 || Object.is(value, -0));
  const size = kind === 'powers' ? value : Math.abs(value);
  // Codes of one sign rise with their values: find the largest that is not above.
  let low = 0;
  let high = kind === 'powers' ? 255 : 2 ** (exponent + mantissa);
  const end = high;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (table[middle] <= size) low = middle;
    else high = middle;
  }
  const [below, above] = [table[low], low + 1 < end ? table[low + 1] : NaN];
  if (size < below || (size > below && Number.isNaN(above))) {
    throw new RangeError(`${value} is out of the range of ${dtype}`);
  }
  if (size > below) {
    if (above === Infinity) {
      if (size - below >= (below - table[low - 1]) / 2) low += 1;
    } else if (size - below > above - size || (size - below === above - size && low % 2)) {
      low += 1;
    }
  }
  if (!negative || (kind === 'fnuz' && low === 0)) return low;
  return low | (1 << (exponent + mantissa));
}

/** Numbers of a decoded array: true/false for bool, BigInt for 64 bits, [real, imaginary]. */
export function toNumbers({ dtype, values }) {
  if (dtype === 'bool') return Array.from(values, (value) => value !== 0);
  if (dtype.startsWith('complex')) {
    return Array.from({ length: values.length / 2 }, (_, i) => [values[2 * i], values[2 * i + 1]]);
  }
  if (!FORMATS.has(dtype)) return Array.from(values);
  const table = tableOf(dtype);
  return Array.from(values, (code) => table[code]);
}

/** Bits of numbers in one of the formats above, rounded to the nearest (half: to the even one). */
export function fromNumbers(dtype, numbers) {
  const format = FORMATS.get(dtype);
  if (!format) throw new RangeError(`fromNumbers is for ${[...FORMATS.keys()].join(', ')}`);
  const table = tableOf(dtype);
  const Type = format.bits === 8 ? Uint8Array : Uint16Array;
  return Type.from(numbers, (number) => codeOf(number, dtype, table));
}
