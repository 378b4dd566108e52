"""The client library against `producer/vectors.json`, which was made without it."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from slotstream import codec, names
from slotstream.errors import BadFrame, BadName, BadReply
from slotstream.ids import EntryId

pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need the package ml_dtypes")

PRODUCER = Path(__file__).resolve().parent.parent / "producer"
TEXT = (PRODUCER / "vectors.json").read_text(encoding="ascii")
VECTORS: dict[str, Any] = json.loads(TEXT)
Item = dict[str, Any]


def each(section: str) -> pytest.MarkDecorator:
    """Parametrise a test by a section's vectors, each under its name."""
    return pytest.mark.parametrize(
        "item", VECTORS[section], ids=lambda item: re.sub(r"[^\w.-]+", "_", item.get("name", ""))
    )


def number(value: float) -> float | str:
    return value if np.isfinite(value) else str(float(value))


def values(array: codec.Array) -> list[Any]:
    """An array's values as the vectors write them."""
    flat = array.reshape(-1)
    if array.dtype.kind == "b":
        return [bool(v) for v in flat]
    if array.dtype.kind in "iu":
        return [str(v) if array.dtype.itemsize == 8 else int(v) for v in flat]
    if array.dtype.kind == "c":
        return [[number(float(v.real)), number(float(v.imag))] for v in flat]
    return [number(float(v)) for v in flat]


def same(array: codec.Array, item: Item) -> None:
    assert codec.name_of(array.dtype) == item["dtype"]
    assert list(array.shape) == item["shape"]
    assert array.tobytes().hex() == item["data"]
    assert repr(values(array)) == repr(item["values"])  # repr: -0.0 is not 0.0, 1 not True


def test_the_committed_vectors_are_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PRODUCER))
    assert importlib.import_module("make_vectors").vectors() == TEXT


def test_the_vectors_hold_every_dtype() -> None:
    assert {item["dtype"] for item in VECTORS["frames"]} == set(codec.DTYPES)


@each("frames")
def test_a_frame_decodes_to_its_values_and_encodes_to_its_bytes(item: Item) -> None:
    raw = bytes.fromhex(item["raw"])
    array = codec.decode(raw)
    assert isinstance(array, np.ndarray)
    same(array, item)
    assert codec.encode(array) == raw
    frames = codec.FrameCodec(item["dtype"], tuple(item["shape"]))
    same(frames.decode(raw), item)
    assert frames.encode(array) == raw


@each("frames")
def test_values_written_as_numbers_give_the_same_bits(item: Item) -> None:
    dtype, listed = codec.dtype_of(item["dtype"]), item["values"]
    if dtype.kind == "c":  # pairs of floats
        dtype = np.dtype(f"float{dtype.itemsize * 4}")
        listed = [part for pair in listed for part in pair]
    bits = np.frombuffer(bytes.fromhex(item["data"]), dtype)
    if dtype.kind in "iu":
        assert np.array([int(v) for v in listed], dtype).tobytes() == bits.tobytes()
        return
    wide = np.array([float(v) for v in listed], np.float64)
    known = ~np.isnan(wide)  # a nan has many codes
    assert wide[known].astype(dtype).tobytes() == bits[known].tobytes()


@each("outputs")
def test_several_outputs_decode_by_name(item: Item) -> None:
    raw = bytes.fromhex(item["raw"])
    outputs = codec.decode(raw)
    assert isinstance(outputs, dict)
    assert list(outputs) == list(item["outputs"])
    for name, output in outputs.items():
        same(output, item["outputs"][name])
    assert codec.encode(outputs) == raw


@each("also_valid")
def test_other_valid_encodings_are_read_too(item: Item) -> None:
    raw = bytes.fromhex(item["raw"])
    assert item["raw"] != item["usual"]
    array = codec.decode(raw)
    assert isinstance(array, np.ndarray)
    same(array, item)
    same(codec.FrameCodec(item["dtype"], tuple(item["shape"])).decode(raw), item)
    assert codec.encode(array).hex() == item["usual"]


@each("invalid")
def test_bytes_that_are_no_frame_are_refused_with_their_code(item: Item) -> None:
    raw, limit = bytes.fromhex(item["raw"]), item.get("max_bytes", codec.MAX_FRAME_BYTES)
    with pytest.raises(BadFrame) as caught:
        codec.decode(raw, max_bytes=limit)
    assert caught.value.code == item["code"]
    if limit == codec.MAX_FRAME_BYTES:
        with pytest.raises(BadFrame) as caught:
            codec.FrameCodec("float32", (1,)).decode(raw)
        assert caught.value.code == item["code"]


@each("errors")
def test_an_error_reply_is_a_map_of_code_and_message(item: Item) -> None:
    raw = bytes.fromhex(item["raw"])
    value = {"code": item["code"], "message": item["message"]}
    assert msgpack.unpackb(raw) == value
    assert msgpack.packb(value) == raw


def test_every_code_of_the_protocol_has_a_vector_and_stands_in_its_text() -> None:
    codes = {item["code"] for item in VECTORS["errors"]}
    assert {item["code"] for item in VECTORS["invalid"]} <= codes
    text = (PRODUCER / "PROTOCOL.md").read_text(encoding="ascii")
    section = text.split("\n## Errors\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == codes


def test_ids_sort_as_redis_sorts_them() -> None:
    order = [EntryId.parse(text) for text in VECTORS["ids"]["order"]]
    assert sorted(order[7:] + order[:7]) == order
    assert [str(entry) for entry in order] == VECTORS["ids"]["order"]
    for first, second in VECTORS["ids"]["next"]:
        assert str(EntryId.parse(first).next()) == second
    for short, full in VECTORS["ids"]["short"]:
        assert EntryId.parse(short.encode()) == EntryId.parse(full)


@pytest.mark.parametrize("text", VECTORS["ids"]["invalid"])
def test_a_text_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(BadReply):
        EntryId.parse(text)


@pytest.mark.parametrize(
    ("kind", "check"), [("app", names.check_app), ("session", names.check_session)]
)
def test_names_are_taken_or_refused(kind: str, check: Any) -> None:
    for name in VECTORS["names"][kind]["valid"]:
        assert check(name) == name
    for name in VECTORS["names"][kind]["invalid"]:
        with pytest.raises(BadName):
            check(name)


def test_a_session_is_in_the_partition_of_its_stem() -> None:
    for item in VECTORS["partitions"]:
        assert names.partition_of(item["session"], item["partitions"]) == item["partition"]


@each("keys")
def test_keys_are_named_as_written(item: Item) -> None:
    keys = names.Keys(item["app"], item["partition"])
    session, worker = item["session"], item["worker"]
    assert item["keys"] == {
        "config": names.config_key(item["app"]),
        "control": keys.control, "waiting": keys.waiting, "sessions": keys.sessions,
        "workers": keys.workers, "epoch": keys.epoch, "in": keys.inbox(session),
        "out": keys.outbox(session), "slot": keys.row(session),
        "lease": keys.lease(worker), "owned": keys.owned(worker),
    }  # fmt: skip


def test_the_session_of_the_vectors_follows_the_rules() -> None:
    session = VECTORS["session"]
    frames = codec.FrameCodec(session["app"]["dtype"], tuple(session["app"]["shape"]))
    ended = answer_all(frames, session["in"])
    replies = [(i, {k: bytes.fromhex(v) for k, v in f.items()}) for i, f in session["out"]]
    assert replies[0][0] == "0-1"
    assert replies[0][1]["op"] == b"opened"
    assert [i for i, _ in replies[1:]] == [i for i, _ in ended]
    for (_, reply), (_, expected) in zip(replies[1:], ended, strict=True):
        reply.pop("weights", None)
        if "error" in reply:
            reply["error"] = msgpack.unpackb(reply["error"])["code"].encode()
        assert reply == expected


def answer_all(frames: codec.FrameCodec, pushed: list[Any]) -> list[tuple[str, dict[str, bytes]]]:
    """Answer entries by the protocol's rules; the model is a running sum."""
    total = np.zeros(frames.shape, np.float32)
    replies: list[tuple[str, dict[str, bytes]]] = []
    for at, (entry, fields) in enumerate(pushed):
        given, reply = {k: bytes.fromhex(v) for k, v in fields.items()}, dict[str, bytes]()
        after = total
        try:
            if "op" in given:
                if given["op"] != b"reset":
                    raise BadFrame("unknown_op", "")
                after, reply["op"] = np.zeros_like(total), b"reset"
            if "frame" in given:
                after = after + frames.decode(given["frame"]).astype(np.float32)
                reply["output"] = codec.encode(after)
            total = after
        except BadFrame as error:
            reply = {"error": error.code.encode()}
        if "end" in given:
            left = str(len(pushed) - at - 1).encode()
            return [*replies, (entry, {**reply, "end": b"1", "reason": b"end", "cancelled": left})]
        replies.append((entry, reply))
    return replies


def test_the_session_of_the_text_is_what_redis_cli_shows(redis_url: str) -> None:
    if not shutil.which("redis-cli"):
        pytest.skip("redis-cli is not on the PATH")
    text = (PRODUCER / "PROTOCOL.md").read_text(encoding="ascii")
    shown = re.search(r"```text\n(worker> .*?)```", text, re.DOTALL)
    assert shown
    steps = re.findall(r"^(?:worker)?> (.*)\n((?:(?!(?:worker)?> ).*\n)*)", shown[1], re.MULTILINE)
    assert len(steps) > 10
    for command, expected in steps:
        done = subprocess.run(
            ["redis-cli", "-u", redis_url, "--no-raw"],
            input=command + "\n", capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        answer = "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"
        assert re.sub(r'^"\d{13}-0"$', '"1760000000000-0"', answer.rstrip() + "\n") == expected
