"""Bad entries: each is answered by an error that helps, and changes nothing for anybody."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from conftest import ThreadedWorker, streams_of
from serving_models import served
from slotstream.codec import FrameCodec
from slotstream.embedded import EmbeddedRedis
from test_wire import SHAPE, Gate, Wire, assert_right, ids, outputs, packed

PROTOCOL = (Path(__file__).resolve().parent.parent / "producer/PROTOCOL.md").read_text()
LIMIT = 2048
"""The worker's `max_frame_bytes`."""
DATA = np.arange(24, dtype="<f4").tobytes()
WHOLE = msgpack.packb({"dtype": "float32", "shape": [4, 6], "data": DATA})


def frame(**changes: Any) -> tuple[Any, ...]:
    """An entry whose frame's map has these values; one that is None is left out."""
    fields = {"dtype": "float32", "shape": [4, 6], "data": DATA, **changes}
    return raw(msgpack.packb({name: v for name, v in fields.items() if v is not None}))


def raw(value: bytes) -> tuple[Any, ...]:
    return ("frame", value)


def pairs(*items: tuple[Any, Any]) -> tuple[Any, ...]:
    """An entry whose frame is a map of these pairs, in order, also of equal keys."""
    return raw(
        msgpack.Packer().pack_map_header(len(items))
        + b"".join(msgpack.packb(part) for item in items for part in item)
    )


def array(values: Any) -> tuple[Any, ...]:
    """An entry with an array of its own dtype and shape."""
    return frame(dtype=values.dtype.name, shape=list(values.shape), data=values.tobytes())


class Payload:
    """Unpickling this would raise."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


def shaped(*shape: int) -> Any:
    return np.ones(shape, "<f4")


def with_value(value: float) -> Any:
    values = np.sin(np.arange(24, dtype="<f4")).reshape(4, 6)
    values[2, 3] = value
    return values


NESTED = b"\x91" * 2000 + b"\xc0"
SHAPE_OF = WHOLE.index(b"\x92\x04\x06")
DATA_OF = WHOLE.index(b"\xc4\x60")

# Kind, entry, the codes that PROTOCOL.md allows for it, and words of which the message has one:
# what was expected, or what came.
KINDS: list[tuple[str, tuple[Any, ...], str, str]] = [
    # The bytes
    ("not msgpack", raw(b"\xc1" * 20), "not_msgpack", "msgpack"),
    ("text", raw(b"hello, this is no frame"), "not_msgpack", "msgpack|more than one"),
    ("json", raw(b'{"dtype": "float32", "shape": [4, 6]}'), "not_msgpack", "msgpack|more than one"),
    ("empty", raw(b""), "not_msgpack", "empty"),
    ("truncated in the data", raw(WHOLE[:-1]), "not_msgpack", "msgpack"),
    ("truncated in the map", raw(WHOLE[:20]), "not_msgpack", "msgpack"),
    ("only a map's head", raw(b"\x83"), "not_msgpack", "msgpack"),
    ("one byte behind", raw(WHOLE + b"\x00"), "not_msgpack", "more than one"),
    ("two frames", raw(WHOLE + WHOLE), "not_msgpack", "more than one"),
    ("pickle", raw(pickle.dumps(np.ones(SHAPE, np.float32))), "not_msgpack", "msgpack|more than"),
    ("pickle that runs", raw(pickle.dumps(Payload())), "not_msgpack", "msgpack|more than"),
    ("npy", raw(b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'}" + DATA), "not_msgpack", "msgpack|more"),
    ("bytes alone", raw(DATA), "not_msgpack not_a_map", "msgpack|map|more than"),
    (
        "huge declared bin",
        raw(WHOLE[:DATA_OF] + b"\xc6\xff\xff\xff\xff" + DATA),
        "not_msgpack",
        "msgpack",
    ),
    (
        "huge declared array",
        raw(WHOLE[:SHAPE_OF] + b"\xdd\xff\xff\xff\xff\x04\x06"),
        "not_msgpack",
        "msgpack",
    ),
    ("huge declared map", raw(b"\xdf\xff\xff\xff\xff" + WHOLE[1:]), "not_msgpack", "msgpack"),
    ("huge declared str", raw(b"\x83\xdb\xff\xff\xff\xffdtype"), "not_msgpack", "msgpack"),
    ("str that is no utf-8", raw(WHOLE.replace(b"float32", b"\xff" * 7)), "not_msgpack", "msgpack"),
    ("too large", frame(shape=[96, 6], data=DATA * 24), "too_large", str(LIMIT)),
    ("too large by one", raw(b"\x83" * (LIMIT + 1)), "too_large", str(LIMIT)),
    # The value
    ("array", raw(msgpack.packb(["float32", [4, 6], DATA])), "not_a_map", "map"),
    ("nil", raw(b"\xc0"), "not_a_map", "map"),
    ("number", raw(b"\x2a"), "not_a_map", "map"),
    ("str", raw(msgpack.packb("float32")), "not_a_map", "map"),
    ("bin", raw(msgpack.packb(DATA)), "not_a_map", "map"),
    ("nested deep", raw(NESTED), "not_a_map not_msgpack", "map"),
    ("ext type", raw(msgpack.packb(msgpack.ExtType(5, DATA))), "not_a_map not_msgpack", "map"),
    (
        "timestamp",
        raw(msgpack.packb(msgpack.Timestamp(1_700_000_000, 5))),
        "not_a_map not_msgpack",
        "map",
    ),
    # The map
    ("empty map", raw(b"\x80"), "missing_field", "dtype"),
    ("no dtype", frame(dtype=None), "missing_field", "dtype"),
    ("no shape", frame(shape=None), "missing_field", "shape"),
    ("no data", frame(data=None), "missing_field", "data"),
    ("unknown field in the map", frame(order="C"), "unknown_field", "order"),
    ("a field of numpy", frame(nd=True, type="<f4", kind=b""), "unknown_field", "nd|type|kind"),
    (
        "key twice",
        pairs(("dtype", "float64"), ("dtype", "float32"), ("shape", [4, 6]), ("data", DATA)),
        "unknown_field not_msgpack",
        "dtype|twice|more",
    ),
    (
        "data twice",
        pairs(("dtype", "float32"), ("shape", [4, 6]), ("data", b""), ("data", DATA)),
        "unknown_field not_msgpack",
        "data|twice|more",
    ),
    (
        "keys that are numbers",
        pairs((0, "float32"), (1, [4, 6]), (2, DATA)),
        "not_msgpack missing_field unknown_field",
        "dtype|map",
    ),
    (
        "a further key that is a number",
        pairs(("dtype", "float32"), ("shape", [4, 6]), ("data", DATA), (7, 1)),
        "not_msgpack unknown_field",
        "7|map|msgpack",
    ),
    (
        "keys that are bin",
        pairs((b"dtype", "float32"), (b"shape", [4, 6]), (b"data", DATA)),
        "not_msgpack missing_field unknown_field",
        "dtype|map",
    ),
    (
        "a map of names to frames",
        raw(msgpack.Packer().pack_map_header(1) + msgpack.packb("x") + WHOLE),
        "missing_field",
        "dtype",
    ),
    # The dtype
    ("float64", array(np.ones(SHAPE)), "dtype", "float64"),
    ("float16", array(np.ones(SHAPE, np.float16)), "dtype", "float16"),
    ("int32", array(np.ones(SHAPE, np.int32)), "dtype", "int32"),
    ("bool", array(np.ones(SHAPE, np.bool_)), "dtype", "bool"),
    ("complex64", array(np.ones(SHAPE, np.complex64)), "dtype", "complex64"),
    ("object", frame(dtype="object", data=DATA * 2), "dtype", "object"),
    ("O", frame(dtype="O", data=DATA * 2), "dtype", "'O'"),
    ("structured", frame(dtype="f4,f4", data=DATA * 2), "dtype", "f4,f4"),
    ("structured list", frame(dtype=[["a", "<f4"]]), "dtype", "name"),
    ("void", frame(dtype="V4"), "dtype", "V4"),
    ("big-endian", frame(dtype=">f4", data=np.ones(24, ">f4").tobytes()), "dtype", "little-endian"),
    ("numpy's short name", frame(dtype="<f4"), "dtype", "float32|little-endian"),
    ("upper case", frame(dtype="Float32"), "dtype", "Float32"),
    ("dtype in bin", frame(dtype=b"float32"), "dtype", "name"),
    ("dtype a number", frame(dtype=11), "dtype", "name"),
    ("dtype very long", frame(dtype="float32" + " " * 400), "dtype not_msgpack", "dtype"),
    # The shape
    ("too few steps", array(shaped(3, 6)), "shape", r"\[4, 6\]"),
    ("too many steps", array(shaped(8, 6)), "shape", r"\[4, 6\]"),
    ("transposed", array(shaped(6, 4)), "shape", r"\[4, 6\]"),
    ("flat", array(shaped(24)), "shape", r"\[4, 6\]"),
    ("an axis more", array(shaped(4, 6, 1)), "shape", r"\[4, 6\]"),
    ("a batch axis", array(shaped(1, 4, 6)), "shape", r"\[4, 6\]"),
    ("0-d", array(shaped()), "shape", r"\[4, 6\]"),
    ("an axis of 0", array(shaped(0, 6)), "shape", r"\[4, 6\]"),
    ("an axis of 0 and a huge one", frame(shape=[0, 2**62, 2**62], data=b""), "shape", "axis|4, 6"),
    ("huge", frame(shape=[2**62, 2**62]), "shape byte_count", r"4, 6|bytes"),
    ("huge unsigned", frame(shape=[2**64 - 1, 2**64 - 1]), "shape byte_count", r"4, 6|bytes"),
    ("negative", frame(shape=[-4, -6]), "shape", "whole numbers"),
    ("an axis of -1", frame(shape=[-1, 6]), "shape", "whole numbers"),
    ("floats", frame(shape=[4.0, 6.0]), "shape", "whole numbers"),
    ("bools", frame(shape=[True, 24]), "shape", "whole numbers"),
    ("strs", frame(shape=["4", "6"]), "shape", "whole numbers"),
    ("a number", frame(shape=24), "shape", "list"),
    ("a str", frame(shape="4,6"), "shape", "list"),
    ("a map", frame(shape={"0": 4}), "shape", "list"),
    ("nested", frame(shape=[[4, 6]]), "shape", "list|whole numbers"),
    ("17 axes", frame(shape=[1] * 15 + [4, 6]), "shape", "16|4, 6"),
    ("2000 axes", frame(shape=[1] * 1800), "shape not_msgpack too_large", "axes|shape"),
    (
        "a deep shape",
        raw(WHOLE[:SHAPE_OF] + NESTED + WHOLE[SHAPE_OF + 3 :]),
        "shape not_msgpack too_large",
        "shape|2048",
    ),
    # The data
    ("one byte short", frame(data=DATA[:-1]), "byte_count", "96.*95"),
    ("one byte long", frame(data=DATA + b"\x00"), "byte_count", "96.*97"),
    ("no bytes", frame(data=b""), "byte_count", "96.*0"),
    ("of float64", frame(data=np.ones(24).tobytes()), "byte_count", "96.*192"),
    ("str for data", frame(data="x" * 96), "data", "bytes.*str"),
    ("list for data", frame(data=[0.5] * 24), "data", "bytes.*list"),
    ("numbers for data", frame(data=5), "data", "bytes.*int"),
    ("nan", array(with_value(np.nan)), "not_finite", "NaN"),
    ("infinity", array(with_value(-np.inf)), "not_finite", "infinity"),
    # The entry
    ("unknown field", ("frame", WHOLE, "priority", "1"), "unknown_field", "priority"),
    ("unknown field alone", ("colour", "blue"), "unknown_field", "colour"),
    ("unknown binary field", (b"\xff\x00", b"\xfe"), "unknown_field", "frame"),
    ("field in upper case", ("Frame", WHOLE), "unknown_field", "Frame"),
    ("unknown op", ("op", "rewind"), "unknown_op", "rewind|reset"),
    ("unknown op and a frame", ("op", "RESET", "frame", WHOLE), "unknown_op", "RESET|reset"),
    ("empty op", ("op", ""), "unknown_op", "reset"),
    ("binary op", ("op", b"\xff\x00reset"), "unknown_op", "reset"),
    ("fork", ("op", "fork", "target", "a/1"), "unknown_op", "fork"),
    ("fork and a frame", ("op", "fork", "target", "a/1", "frame", WHOLE), "unknown_op", "fork"),
    ("target alone", ("target", "a/1"), "no_frame unknown_field", "target|frame"),
    ("end=2", ("frame", WHOLE, "end", "2"), "bad_end", "1.*2"),
    ("end=true alone", ("end", "true"), "bad_end", "1.*true"),
    ("empty end", ("end", ""), "bad_end", "1"),
    ("frame twice", ("frame", WHOLE, "frame", WHOLE), "unknown_field", "frame|once|twice"),
    ("op twice", ("op", "reset", "op", "reset"), "unknown_field", "op|once|twice"),
]


ENTRIES = [kind[1] for kind in KINDS if not kind[0].endswith("twice")]
"""All of them for the tests of many at once, without those that have tests of their own."""


@pytest.fixture(scope="module")
def model() -> Any:
    return served()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def gate(server: EmbeddedRedis, model: Any) -> Iterator[Gate]:
    worker = ThreadedWorker(
        server.url, model, app="bad", finite=True, max_frame_bytes=LIMIT, checkpoint_interval_s=0.05
    )
    gate = Gate(worker)
    worker.start()
    yield gate
    worker.drain()


@pytest.fixture
def wire(server: EmbeddedRedis, gate: Gate) -> Iterator[Wire]:
    wire = Wire(server.url, "bad")
    yield wire
    assert gate.worker.thread.is_alive(), f"the worker has ended: {gate.worker.error}"
    wire.finish()
    wire.redis.close()


@pytest.fixture(scope="module")
def clean(server: EmbeddedRedis, gate: Gate, model: Any) -> dict[str, tuple[Any, list[bytes]]]:
    """Streams, and their outputs in a run without a bad entry."""
    wire = Wire(server.url, "bad")
    found = {}
    for name, stream in streams_of(3, 8, SHAPE, seed=11).items():
        session = wire.open()
        wire.push(session, stream, end=True)
        found[name] = (stream, outputs(wire.read(session)))
        assert_right(model, stream, found[name][1])
    wire.redis.close()
    return found


def assert_error(reply: Any, codes: str, words: str) -> None:
    """An error of one of these codes, known to PROTOCOL.md, whose message is a helpful sentence."""
    assert set(reply.fields) == {b"error"}, f"the entry was taken: {reply}"
    code, message = reply.error["code"], reply.error["message"]
    assert code in codes.split(), message
    assert 15 < len(message) <= 500
    assert " " in message
    assert message.isprintable()
    assert re.search(words, message), f"{message!r} says nothing of {words}"


@pytest.mark.parametrize(
    ("entry", "codes", "words"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS]
)
def test_a_bad_entry_is_answered_by_an_error_and_harms_nobody(wire, clean, entry, codes, words):
    stream, expected = clean["s0"]
    neighbour_stream, neighbour_expected = clean["s1"]
    session, neighbour = wire.open(), wire.open()
    pipeline = wire.redis.pipeline(transaction=True)  # so that both are in the same rounds
    entries = [("frame", packed(one)) for one in stream]
    entries.insert(3, entry)
    for name, pushed in (
        (session, entries),
        (neighbour, [("frame", packed(one)) for one in neighbour_stream]),
    ):
        for k, fields in enumerate(pushed):
            pipeline.execute_command("XADD", wire.key("in", name), f"{k + 1}-0", *fields)
    pipeline.execute()
    replies = wire.read(session, 9)
    assert ids(replies) == [f"{k}-0" for k in range(1, 10)]
    assert outputs(replies) == expected
    assert outputs(wire.read(neighbour, 8)) == neighbour_expected
    assert_error(replies[3], codes, words)


@pytest.mark.parametrize("code", sorted({code for kind in KINDS for code in kind[2].split()}))
def test_every_code_an_error_may_have_stands_in_the_protocol(code):
    table = PROTOCOL[PROTOCOL.index("## Errors") : PROTOCOL.index("## Retention")]
    assert f"`{code}`" in table


def test_bad_entries_alone_leave_a_session_at_rest(wire, clean):
    stream, expected = clean["s2"]
    session = wire.open()
    entries = [wire.add(session, "*", *entry) for entry in ENTRIES]
    replies = wire.read(session, len(entries))
    assert ids(replies) == entries
    wire.push(session, stream, first="*")
    assert outputs(wire.read(session, 8, after=entries[-1])) == expected


def test_bad_entries_of_all_kinds_between_all_frames_change_no_bit(wire, gate, clean):
    # Three sessions in the same rounds, their bad entries at different places.
    with gate.held():
        sessions = {name: wire.open() for name in clean}
        for shift, (name, (stream, _)) in enumerate(clean.items()):
            for k, one in enumerate(stream):
                for entry in ENTRIES[shift + k :: 8]:
                    wire.add(sessions[name], "*", *entry)
                wire.add(sessions[name], "*", "frame", packed(one))
            wire.add(sessions[name], "*", "end", "1")
    for shift, (name, (_, expected)) in enumerate(clean.items()):
        replies = wire.read(sessions[name])
        assert outputs(replies) == expected
        assert sum(b"error" in reply.fields for reply in replies) == len(ENTRIES) - shift
        assert replies[-1].fields[b"reason"] == b"end"


@pytest.mark.parametrize(
    "entry",
    [
        raw(WHOLE[:-1]),
        ("frame", WHOLE, "colour", "blue"),
        ("op", "rewind", "frame", WHOLE),
        array(with_value(np.nan)),
    ],
    ids=["truncated", "unknown field", "unknown op", "nan"],
)
def test_a_bad_entry_with_an_end_answers_the_error_and_ends(wire, clean, entry):
    stream, expected = clean["s1"]
    session = wire.open()
    wire.push(session, stream)
    wire.add(session, "9-0", *entry, "end", "1")
    replies = wire.read(session)
    assert outputs(replies) == expected
    assert set(replies[-1].fields) == {b"error", b"end", b"reason", b"cancelled"}
    assert replies[-1].fields[b"reason"] == b"end"


def test_any_msgpack_of_the_map_is_taken(wire, clean):
    stream, expected = clean["s2"]
    forms: list[Callable[[bytes], bytes]] = [
        lambda data: packed(np.frombuffer(data, "<f4").reshape(SHAPE)),
        lambda data: msgpack.packb({"data": data, "shape": [4, 6], "dtype": "float32"}),
        lambda data: b"\xde\x00\x03" + packed(np.frombuffer(data, "<f4").reshape(SHAPE))[1:],
        lambda data: (
            b"\xdf\x00\x00\x00\x03\xd9\x05dtype\xda\x00\x07float32\xa5shape"
            b"\xdd\x00\x00\x00\x02\xcd\x00\x04\xcf"
            + struct.pack(">Q", 6)
            + b"\xdb\x00\x00\x00\x04data\xc6\x00\x00\x00\x60"
            + data
        ),
    ]
    session = wire.open()
    for k, one in enumerate(stream):
        wire.add(session, f"{k + 1}-0", "frame", forms[k % 4](one.astype("<f4").tobytes()))
    assert outputs(wire.read(session, 8)) == expected


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9])
def test_few_frames_and_many_are_read_alike(count: int) -> None:
    """The usual ones come out as they are, and each of the others is named."""
    codec = FrameCodec("float32", (2, 3))
    frames = np.random.default_rng(3).normal(size=(count, 2, 3)).astype(np.float32)
    raws = [codec.encode(frame) for frame in frames]
    found, others = codec.many(raws)
    assert (found.tobytes(), found.shape, others.any()) == (frames.tobytes(), frames.shape, False)
    for spoilt in range(count):
        head = bytearray(raws[spoilt])
        head[3] ^= 1
        found, others = codec.many([*raws[:spoilt], bytes(head), *raws[spoilt + 1 :]])
        assert np.flatnonzero(others).tolist() == [spoilt]
        usual = np.delete(np.arange(count), spoilt)
        assert found[usual].tobytes() == frames[usual].tobytes()
