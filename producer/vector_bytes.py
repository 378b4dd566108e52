"""Msgpack and floats from their definitions, for `make_vectors.py`; slow, small, independent."""

from __future__ import annotations

import math
import struct
from typing import Any

Item = dict[str, Any]

# Floats: bits of the exponent, bits of the mantissa, bias, and which codes are not numbers:
# "ieee" (inf and nan), "fn" (only all ones is nan), "fnuz" (only the code of -0 is nan).
FLOATS = {
    "float16": (5, 10, 15, "ieee"),
    "float32": (8, 23, 127, "ieee"),
    "float64": (11, 52, 1023, "ieee"),
    "bfloat16": (8, 7, 127, "ieee"),
    "float8_e3m4": (3, 4, 3, "ieee"),
    "float8_e4m3": (4, 3, 7, "ieee"),
    "float8_e4m3b11fnuz": (4, 3, 11, "fnuz"),
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
INTS = {f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32, 64)}


def float_value(dtype: str, code: int) -> float | str:
    """Value of a float's bits, worked out from its format."""
    if dtype == "float8_e8m0fnu":  # a power of two: no sign, no mantissa
        return "nan" if code == 255 else math.ldexp(1.0, code - 127)
    exponent_bits, mantissa_bits, bias, kind = FLOATS[dtype]
    top = 2**exponent_bits - 1
    negative, exponent = code >> (exponent_bits + mantissa_bits), code >> mantissa_bits & top
    mantissa = code & (2**mantissa_bits - 1)
    if kind == "ieee" and exponent == top:
        return "nan" if mantissa else "-inf" if negative else "inf"
    if kind == "fn" and exponent == top and mantissa == 2**mantissa_bits - 1:
        return "nan"
    if kind == "fnuz" and negative and not exponent and not mantissa:
        return "nan"
    whole = mantissa + (2**mantissa_bits if exponent else 0)
    value = math.ldexp(whole, max(exponent, 1) - bias - mantissa_bits)
    return -value if negative else value


def head(size: int, form: str, short: tuple[int, int] | None, long: bytes) -> bytes:
    """Make a msgpack head; `form` is "" for the shortest, else the bytes the size takes."""
    if form == "" and short and size <= short[1]:
        return bytes([short[0] | size])
    widths = {1: ">B", 2: ">H", 4: ">I"}
    codes = dict(zip((1, 2, 4), long, strict=True)) if len(long) == 3 else {2: long[0], 4: long[1]}
    width = int(form) if form else next(w for w in codes if size < 256**w)
    return bytes([codes[width]]) + struct.pack(widths[width], size)


def pack(value: object, form: str = "") -> bytes:
    """Msgpack of a value; `form` "4" writes every size (and whole number) in four bytes."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, int):
        if value < 0:
            return struct.pack(">b", value)
        if value >= 2**32:
            return b"\xcf" + struct.pack(">Q", value)
        return head(value, form, (0, 127), b"\xcc\xcd\xce")
    if isinstance(value, str):
        return head(len(value), form, (0xA0, 31), b"\xd9\xda\xdb") + value.encode("ascii")
    if isinstance(value, bytes):
        return head(len(value), form, None, b"\xc4\xc5\xc6") + value
    if isinstance(value, list):
        items = b"".join(pack(item, form) for item in value)
        return head(len(value), form, (0x90, 15), b"\xdc\xdd") + items
    if isinstance(value, dict):
        items = b"".join(pack(k, form) + pack(v, form) for k, v in value.items())
        return head(len(value), form, (0x80, 15), b"\xde\xdf") + items
    raise TypeError(type(value).__name__)


def array(dtype: str, shape: list[int], data: bytes, values: list[Any]) -> Item:
    """Describe one array as it stands in the vectors."""
    return {"dtype": dtype, "shape": shape, "values": values, "data": data.hex()}


def frame(dtype: str, shape: list[int], data: bytes) -> Item:
    """Make the map of one array."""
    return {"dtype": dtype, "shape": shape, "data": data}


def f32(*values: float) -> bytes:
    """Pack the data of float32 values."""
    return struct.pack(f"<{len(values)}f", *values)


def floats(dtype: str) -> Item:
    """Make a vector of a float's edge cases; of all 256 codes where it has 8 bits."""
    if dtype.startswith("float8"):
        codes, width = list(range(256)), 1
    else:
        exponent_bits, mantissa_bits, bias, _ = FLOATS[dtype]
        sign, one = 1 << (exponent_bits + mantissa_bits), bias << mantissa_bits
        inf = (2**exponent_bits - 1) << mantissa_bits
        codes = [
            0,
            sign,
            one,
            sign | one | 1 << (mantissa_bits - 1),
            one | 1,
            1,
            one - 3,
            inf - 1,
            inf,
            sign | inf,
            inf | 1 << (mantissa_bits - 1),
            inf | 1,
        ]
        width = (exponent_bits + mantissa_bits + 1) // 8
    data = b"".join(code.to_bytes(width, "little") for code in codes)
    return array(dtype, [len(codes)], data, [float_value(dtype, code) for code in codes])


def integers(dtype: str, bits: int) -> Item:
    """Make a vector of an integer's edge cases."""
    low = 0 if dtype.startswith("u") else -(2 ** (bits - 1))
    numbers = [low, low + 2**bits - 1, 0, 1, low + 2 ** (bits - 1) - 1]
    data = b"".join((n % 2**bits).to_bytes(bits // 8, "little") for n in numbers)
    return array(dtype, [5], data, [str(n) if bits == 64 else n for n in numbers])


def crc16(data: bytes) -> int:
    """CRC16 of Redis Cluster: polynomial 0x1021, start 0."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ (0x1021 if crc & 0x8000 else 0)) & 0xFFFF
    return crc
