"""Write `vectors.json`: what the wire of protocol 1 looks like, byte by byte.

    python producer/make_vectors.py            # writes vectors.json beside this file

Nothing of the client library is used here, not even NumPy or msgpack: the bytes are made from the
text of PROTOCOL.md alone, so that the library and the vectors check each other.

Bytes are hexadecimal. Values are a flat list in C order: numbers, `true` and `false`; the strings
"nan", "inf" and "-inf"; 64-bit integers as decimal strings; complex numbers as [real, imaginary].
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from vector_bytes import (
    FLOATS,
    INTS,
    Item,
    array,
    crc16,
    f32,
    floats,
    frame,
    integers,
    pack,
)

OUT = Path(__file__).resolve().parent / "vectors.json"


def frames() -> list[Item]:
    """Arrays of every dtype, and of every kind of shape."""
    nan, inf = math.nan, math.inf
    ramp = bytes(n % 256 for n in range(300))
    items = {
        "bool": array("bool", [2, 2], b"\1\0\0\1", [True, False, False, True]),
        **{dtype: integers(dtype, bits) for dtype, bits in INTS.items()},
        **{dtype: floats(dtype) for dtype in [*FLOATS, "float8_e8m0fnu"]},
        "complex64": array(
            "complex64",
            [3],
            f32(1.5, -2, inf, nan, 0, -0.0),
            [[1.5, -2.0], ["inf", "nan"], [0.0, -0.0]],
        ),
        "complex128": array("complex128", [1], struct.pack("<2d", 0.1, -1e300), [[0.1, -1e300]]),
        "no axis": array("float32", [], f32(3), [3.0]),
        "an axis of nothing": array("float32", [0, 4], b"", []),
        "nothing between": array("int64", [2, 0, 3], b"", []),
        "C order": array("int16", [2, 3], struct.pack("<6h", *range(1, 7)), list(range(1, 7))),
        "bin 16, and a long axis": array("uint8", [300], ramp, list(ramp)),
        "16 axes": array("uint8", [1] * 16, b"\7", [7]),
    }
    return [
        {
            "name": name,
            **item,
            "raw": pack(frame(item["dtype"], item["shape"], bytes.fromhex(item["data"]))).hex(),
        }
        for name, item in items.items()
    ]


def outputs() -> list[Item]:
    """List replies of a model with several outputs."""
    scores, spikes = (
        array("float32", [2], f32(0.5, -1), [0.5, -1.0]),
        array("bool", [1, 2], b"\1\0", [True, False]),
    )
    packed = {
        name: frame(item["dtype"], item["shape"], bytes.fromhex(item["data"]))
        for name, item in (("scores", scores), ("spikes", spikes))
    }
    return [
        {
            "name": "two outputs",
            "outputs": {"scores": scores, "spikes": spikes},
            "raw": pack(packed).hex(),
        }
    ]


def also_valid() -> list[Item]:
    """List encodings other than the usual one; a reader takes them as well."""
    item, usual = array("float32", [2], f32(1, -2), [1.0, -2.0]), frame("float32", [2], f32(1, -2))
    turned = {key: usual[key] for key in ("data", "shape", "dtype")}
    parts = b"".join(pack(k) + pack(v) for k, v in usual.items())
    raws = {
        "other order of keys": pack(turned),
        "sizes in four bytes": pack(usual, "4"),
        "map of 16 bits": b"\xde\0\3" + parts,
        "sizes in two bytes": pack(usual, "2"),
        "axis as a signed number": pack(usual).replace(b"\x91\2", b"\x91\xd1\0\2"),
        "axis in eight bytes": pack(usual).replace(b"\x91\2", b"\x91\xcf" + b"\0" * 7 + b"\2"),
    }
    return [
        {"name": name, **item, "usual": pack(usual).hex(), "raw": raw.hex()}
        for name, raw in raws.items()
    ]


def invalid() -> list[Item]:
    """Bytes that are no frame, and the code of the error that says so."""
    good = frame("float32", [1], f32(1))
    raw = pack(good)
    cases: list[tuple[str, str, object]] = [
        ("empty", "not_msgpack", b""),
        ("cut off", "not_msgpack", raw[:-1]),
        ("two values", "not_msgpack", raw + b"\xc0"),
        ("a reserved code", "not_msgpack", b"\xc1"),
        ("a key that is a number", "not_msgpack", b"\x81\1\2"),
        ("an extension type", "not_msgpack", b"\xd6\x01\0\0\0\0"),
        ("a list", "not_a_map", pack([1])),
        ("nil", "not_a_map", pack(None)),
        ("bare data", "not_a_map", pack(f32(1))),
        ("no dtype", "missing_field", {"shape": [1], "data": f32(1)}),
        ("an empty map", "missing_field", {}),
        ("a fourth field", "unknown_field", {**good, "scale": 2}),
        ("a name nobody knows", "dtype", {**good, "dtype": "float31"}),
        ("NumPy's short form", "dtype", {**good, "dtype": "<f4"}),
        ("objects", "dtype", {**good, "dtype": "object"}),
        ("dtype is a number", "dtype", {**good, "dtype": 4}),
        ("a negative axis", "shape", {**good, "shape": [-1]}),
        ("half an axis", "shape", {**good, "shape": [1.5]}),
        ("an axis that is a bool", "shape", {**good, "shape": [True]}),
        ("shape is a number", "shape", {**good, "shape": 1}),
        ("17 axes", "shape", {**good, "shape": [1] * 17}),
        ("nothing, by an axis out of bounds", "shape", frame("float32", [0, 2**63], b"")),
        ("data as text", "data", {**good, "data": "abcd"}),
        ("data as numbers", "data", {**good, "data": [1]}),
        ("a byte short", "byte_count", {**good, "data": f32(1)[:3]}),
        ("an axis too many", "byte_count", {**good, "shape": [1, 2]}),
        ("axes beyond all memory", "byte_count", {**good, "shape": [2**63] * 16}),
    ]
    mixed = b"\x85" + raw[1:] + b"\xc4\1x\1" + b"\xa1y\2"
    cases.append(("one unknown key in bytes, one as text", "unknown_field", mixed))
    items = [
        {"name": name, "code": code, "raw": (v if isinstance(v, bytes) else pack(v)).hex()}
        for name, code, v in cases
    ]
    return [
        *items,
        {
            "name": "one byte over the limit",
            "code": "too_large",
            "max_bytes": len(raw) - 1,
            "raw": raw.hex(),
        },
    ]


def session() -> Item:
    """All entries of one session of an app that answers with the running sum of its frames."""

    def put(**fields: object) -> Item:
        return {
            k: (pack(v) if isinstance(v, dict) else str(v).encode()).hex()
            for k, v in fields.items()
        }

    def two(a: float, b: float) -> Item:
        return frame("float32", [2], f32(a, b))

    pushed = [
        ("1-0", put(frame=two(1, 2))),
        ("2-0", put(frame=two(0.5, -2))),
        ("3-0", put(op="reset", frame=two(4, 4))),
        ("4-0", put(frame=frame("float32", [3], f32(1, 2, 3)))),
        ("5-0", put(op="reset")),
        ("6-0", put(op="fork", target="a/1")),
        ("7-0", put(frame=two(1, 1))),
        ("8-0", put(op="reset", frame=frame("int8", [2], b"\1\2"))),
        ("9-0", put(frame=two(1, 1))),
        ("10-0", put(frame=two(0, 1), end=1)),
        ("11-0", put(frame=two(9, 9))),
    ]
    ran = {"weights": "3f9a61c20b7e"}
    end = {"end": 1, "reason": "end", "cancelled": 1}
    replies = [
        ("0-1", put(op="opened", worker="w1.8c1f02d7")),
        ("1-0", put(output=two(1, 2), **ran)),
        ("2-0", put(output=two(1.5, 0), **ran)),
        ("3-0", put(output=two(4, 4), op="reset", **ran)),
        ("4-0", put(error={"code": "shape", "message": "expected [2], got [3]"})),
        ("5-0", put(op="reset")),
        ("6-0", put(error={"code": "unknown_op", "message": "fork is reserved"})),
        ("7-0", put(output=two(1, 1), **ran)),
        ("8-0", put(error={"code": "dtype", "message": "expected float32, got int8"})),
        ("9-0", put(output=two(2, 2), **ran)),
        ("10-0", put(output=two(2, 3), **ran, **end)),
    ]
    return {"app": {"dtype": "float32", "shape": [2]}, "in": pushed, "out": replies}


def names() -> Item:
    """Names that are taken and names that are refused."""
    return {
        "app": {
            "valid": ["slotstream", "a", "0-_", "x" * 64],
            "invalid": ["", "A", "a.b", "a:0", "{a}", "a\n", "x" * 65],
        },
        "session": {
            "valid": ["a", "A.b_c:d/e-9", "/", "a/", "x" * 128],
            "invalid": ["", "a b", "{a}", "a*", "a\n", "caf\u00e9", "x" * 129],
        },
    }


def partitions() -> list[Item]:
    """Sessions and the partitions they are in; what follows the first `/` does not count."""
    sessions = ["123456789", "a", "a/1", "a/2/b", "/", "/a", "b", "b-1", "cam-7", "cam-7/whatif"]
    return [
        {
            "session": s,
            "partitions": n,
            "crc16": crc16(s.split("/")[0].encode()),
            "partition": crc16(s.split("/")[0].encode()) % n,
        }
        for s in sessions
        for n in (1, 16, 1000)
    ]


def keys() -> list[Item]:
    """Every key of a session, and of its partition."""
    items = []
    for app, n, s, w in (("demo", 1, "a", "w1.8c1f02d7"), ("my_app-2", 16, "cam:7/x", "gpu-0.f0")):
        p = crc16(s.split("/")[0].encode()) % n
        tag = f"{{{app}:{p}}}:"
        shared = ("control", "waiting", "sessions", "workers", "epoch")
        whole = {name: tag + name for name in shared}
        items.append(
            {
                "app": app,
                "session": s,
                "worker": w,
                "partitions": n,
                "partition": p,
                "keys": {
                    "config": f"{app}:config",
                    **whole,
                    "in": f"{tag}in:{s}",
                    "out": f"{tag}out:{s}",
                    "slot": f"{tag}slot:{s}",
                    "lease": f"{tag}lease:{w}",
                    "owned": f"{tag}owned:{w}",
                },
            }
        )
    return items


def ids() -> Item:
    """Ids of entries: their order, the next one after each, and texts that are none."""
    top = str(2**64 - 1)
    order = [
        "0-0",
        "0-1",
        "0-2",
        "0-10",
        "1-0",
        "2-0",
        "9-0",
        "10-0",
        "10-9",
        "10-10",
        "11-0",
        "1526919030474-0",
        "1526919030474-55",
        f"{2**53}-0",
        f"{2**53 + 1}-0",
        f"{2**53 + 1}-{2**53}",
        f"{2**53 + 1}-{2**53 + 1}",
        f"{top}-0",
        f"{top}-{top}",
    ]
    after = [
        ["0-0", "0-1"],
        ["1-0", "1-1"],
        ["9-9", "9-10"],
        [f"5-{2**53}", f"5-{2**53 + 1}"],
        [f"5-{top}", "6-0"],
    ]
    return {
        "order": order,
        "next": after,
        "short": [["12", "12-0"]],
        "invalid": ["", "-", "-1", "+1-0", "1-2-3", "a-0", "1-x", "1 -0", "1.5-0", "*", "$"],
    }


def errors() -> list[Item]:
    """List the maps of `error` replies; messages are for people and may change."""
    codes = [
        "not_msgpack",
        "not_a_map",
        "missing_field",
        "unknown_field",
        "dtype",
        "shape",
        "data",
        "byte_count",
        "too_large",
        "not_finite",
        "no_frame",
        "unknown_op",
        "launch_failed",
        "bad_end",
        "quarantined",
        "forgotten",
    ]
    return [
        {
            "code": code,
            "message": f"why: {code}",
            "raw": pack({"code": code, "message": f"why: {code}"}).hex(),
        }
        for code in codes
    ]


def vectors() -> str:
    """Text of vectors.json: one vector a line."""
    sections: Item = {
        "protocol": 1,
        "frames": frames(),
        "outputs": outputs(),
        "also_valid": also_valid(),
        "invalid": invalid(),
        "errors": errors(),
        "ids": ids(),
        "names": names(),
        "partitions": partitions(),
        "keys": keys(),
        "session": session(),
    }
    lines = []
    for name, section in sections.items():
        if isinstance(section, list):
            body = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in section) + "\n ]"
        elif isinstance(section, dict):
            rows = []
            for key, value in section.items():
                rows.append(f"  {json.dumps(key)}: {_spread(value)}")
            body = "{\n" + ",\n".join(rows) + "\n }"
        else:
            body = json.dumps(section)
        lines.append(f" {json.dumps(name)}: {body}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _spread(value: Any) -> str:
    """Write a list of entries one a line, anything else on one."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return "[\n" + ",\n".join(f"   {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)


if __name__ == "__main__":
    OUT.write_text(vectors(), encoding="ascii")
