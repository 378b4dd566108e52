"""An encoding whose like has been seen reads as it would have without."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest

from slotstream import BadFrame, codec
from slotstream.layouts import Layouts

OUTPUTS = {
    "one": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a number": np.float64(3.5),
    "named": {
        "scores": np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3),
        "spikes": np.uint8([[0, 1, 1], [1, 0, 0]]),
    },
    "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
    "long": np.arange(300, dtype=np.complex64),
}


def read(raw: bytes) -> Any:
    """What decoding gives or refuses, so that it compares."""
    try:
        found = codec.decode(raw)
    except BadFrame as error:
        return error.code, str(error)
    arrays = found if isinstance(found, dict) else {"": found}
    return [(name, a.dtype.name, a.shape, a.tobytes()) for name, a in arrays.items()]


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> Layouts:
    """What is known of encodings: nothing yet."""
    monkeypatch.setattr(codec, "_layouts", Layouts())
    return codec._layouts


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_second_output_of_one_layout_is_read_right(layouts, name):
    output = OUTPUTS[name]
    if isinstance(output, dict):
        other = {key: array[::-1] * array.dtype.type(3) for key, array in output.items()}
    else:
        other = np.asarray(output)[..., ::-1] if np.ndim(output) else np.float64(-7)
    first, second = codec.encode(output), codec.encode(other)
    assert len(first) == len(second)
    expected = read(second)
    codec._layouts = Layouts()
    read(first)
    assert codec._layouts.read(second) is not None
    assert read(second) == expected
    arrays = codec.decode(second)
    for array in arrays.values() if isinstance(arrays, dict) else [arrays]:
        assert array.flags.aligned
        assert not array.flags.writeable


@pytest.mark.parametrize("name", ["one", "named", "bfloat16"])
def test_any_byte_that_differs_is_read_as_if_nothing_were_known(layouts, name):
    raw = codec.encode(OUTPUTS[name])
    for k in range(len(raw)):
        for flip in (1, 0x80):
            changed = raw[:k] + bytes([raw[k] ^ flip]) + raw[k + 1 :]
            codec._layouts = Layouts()
            fresh = read(changed)
            codec._layouts = Layouts()
            read(raw)
            assert read(changed) == fresh, f"byte {k}"


def test_what_must_be_looked_at_each_time_is_not_learnt(layouts):
    good = codec.encode(np.array([True, False, True]))
    read(good)
    bad = good[:-1] + b"\x02"
    assert read(bad)[0] == "data"
    # Another order of keys is valid, and of the usual length.
    raw = msgpack.packb({"shape": [2], "dtype": "int8", "data": b"\1\2"})
    assert read(raw) == read(raw) == [("", "int8", (2,), b"\1\2")]
    assert read(codec.encode(np.int8([3, 4]))) == [("", "int8", (2,), b"\3\4")]
    empty = codec.encode(np.empty((0, 3), np.float32))
    assert read(empty) == read(empty) == [("", "float32", (0, 3), b"")]


def test_a_known_output_that_is_too_long_is_refused_all_the_same(layouts):
    raw = codec.encode(OUTPUTS["long"])
    codec.decode(raw)
    with pytest.raises(BadFrame, match=f"at most 100 bytes, got {len(raw)}"):
        codec.decode(raw, max_bytes=100)


def test_what_is_known_does_not_grow_for_ever(layouts):
    for size in range(1, 2000):
        codec.decode(codec.encode(np.zeros(size, np.uint8)))
    assert len(layouts._known) == 256
