"""Manifests: every element of every tensor once, by arithmetic; and what is said where not."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotstream_worker.weights.boxes import Box, flaw
from slotstream_worker.weights.digests import BLOCK_BYTES, digest
from slotstream_worker.weights.errors import BadWeights
from slotstream_worker.weights.manifest import (
    Manifest,
    Options,
    Shard,
    Source,
    Tensor,
    assemble,
    decode_part,
    encode_part,
)
from slotstream_worker.weights.names import check_version, match


def shard(offset, extent, text="d"):
    return Shard(Box(tuple(offset), tuple(extent)), text, (Source("redis", {"prefix": "p"}),))


def tensor(shape, *shards, name="w", dtype="float32"):
    return Tensor(name, dtype, tuple(shape), tuple(shards))


@st.composite
def shape_and_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        offset = tuple(draw(st.integers(0, n)) for n in shape)
        boxes.append(
            Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset,
                                                                          strict=True)))
        )  # fmt: skip
    return shape, boxes


@settings(max_examples=400, deadline=None)
@given(shape_and_boxes())
def test_a_flaw_is_found_exactly_where_counting_every_element_finds_one(case):
    shape, boxes = case
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    assert (flaw(shape, boxes) == "") == bool((counts == 1).all())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_grid_of_cuts_covers(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    edges = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    boxes = [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in itertools.product(*(itertools.pairwise(e) for e in edges))
    ]
    assert flaw(shape, boxes) == ""
    if len(boxes) > 1:
        lacking = boxes[:-1]
        assert f"of {int(np.prod(shape))} elements" in flaw(shape, lacking)
        assert "overlap" in flaw(shape, [*boxes, boxes[0]])


@pytest.mark.parametrize(
    ("shape", "boxes", "said"),
    [
        ((4, 4), [((0, 0), (4, 5))], "does not lie within"),
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (3, 4))], r"overlap in \[1:2, 0:4\]"),
        ((4, 4), [((0, 0), (2, 4))], "8 of 16 elements"),
        ((4, 4), [], "there is none"),
        ((4,), [((0, 0), (4, 1))], "does not lie within"),
        ((), [((), ()), ((), ())], "one shard"),
        ((2,), [((-1,), (2,))], "does not lie within"),
    ],
)
def test_a_flaw_says_what_it_is(shape, boxes, said):
    import re

    found = flaw(shape, [Box(offset, extent) for offset, extent in boxes])
    assert re.search(said, found), found


def test_a_manifest_comes_back_as_it_was_and_its_digests_say_what_changed():
    one = Manifest("v1", (tensor((4, 2), shard((0, 0), (2, 2)), shard((2, 0), (2, 2))),),
                   Options("pin", at_once=True))  # fmt: skip
    assert Manifest.decode(one.encode()) == one
    values = dataclasses.replace(one, tensors=(
        tensor((4, 2), shard((0, 0), (2, 2), "other"), shard((2, 0), (2, 2))),))  # fmt: skip
    layout = dataclasses.replace(one, tensors=(tensor((4, 2), shard((0, 0), (4, 2))),))
    assert (values.fingerprint, values.content == one.content) == (one.fingerprint, False)
    assert layout.fingerprint != one.fingerprint
    assert decode_part(encode_part(one.tensors)) == one.tensors


@pytest.mark.parametrize(
    "raw",
    ["", "[]", "{}", '{"format": 2}', '{"format":1,"version":"v","options":{},"tensors":[{}]}',
     '{"format":1,"version":"v","options":{"on_weights":"maybe"},"tensors":[]}',
     '{"format":1,"version":"v","options":{"what":1},"tensors":[]}',
     '{"format":1,"version":"v","options":{},"tensors":[{"name":"w","dtype":"object","shape":[]}]}'],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(raw):
    with pytest.raises(BadWeights):
        Manifest.decode(raw)


def test_ranks_that_contradict_one_another_are_refused():
    whole = tensor((2, 2), shard((0, 0), (2, 2)))
    with pytest.raises(BadWeights, match="for one rank and"):
        assemble("v", [[whole], [dataclasses.replace(whole, dtype="float16")]], Options())
    with pytest.raises(BadWeights, match="different values"):
        assemble("v", [[whole], [tensor((2, 2), shard((0, 0), (2, 2), "x"))]], Options())
    with pytest.raises(BadWeights, match=r"not whole: w: .* 4 of 8"):
        assemble("v", [[tensor((4, 2), shard((0, 0), (2, 2)))]], Options())
    with pytest.raises(BadWeights, match="holds no tensor"):
        assemble("v", [[]], Options())


def test_a_replicated_shard_is_one_shard_with_several_sources():
    parts = [
        [tensor((2, 2), Shard(Box((0, 0), (2, 2)), "d", (Source("redis", {"prefix": k}),)))]
        for k in "abc"
    ]
    (held,) = assemble("v", parts, Options()).tensors
    assert [s.where["prefix"] for s in held.shards[0].sources] == ["a", "b", "c"]


def test_a_digest_is_of_every_byte_and_of_the_order_of_blocks():
    rng = np.random.default_rng(0)
    data = bytearray(rng.bytes(2 * BLOCK_BYTES + 7))
    first = digest(data)
    for at in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(data) - 1):
        data[at] ^= 1
        assert digest(data) != first
        data[at] ^= 1
    assert digest(data) == first
    swapped = data[BLOCK_BYTES : 2 * BLOCK_BYTES] + data[:BLOCK_BYTES] + data[2 * BLOCK_BYTES :]
    assert digest(swapped) != first
    assert digest(data[:-1]) != first
    assert digest(b"") != digest(b"\0")


def test_names_match_up_to_their_separators_and_a_leading_params():
    leaves = ["params/Dense_0/kernel", "params/Dense_0/bias", "batch_stats/mean"]
    found, over = match(leaves, ["Dense_0.kernel", "params.Dense_0.bias", "batch_stats/mean", "x"])
    assert found == {
        "params/Dense_0/kernel": "Dense_0.kernel",
        "params/Dense_0/bias": "params.Dense_0.bias",
        "batch_stats/mean": "batch_stats/mean",
    }
    assert over == ["x"]
    assert match(["w", "0/b"], ["params/w", "0.b"])[0] == {"w": "params/w", "0/b": "0.b"}
    nnx = ["dense/kernel/value", "dense/bias/value"]
    assert match(nnx, ["dense.kernel", "dense/bias/value"])[0] == {
        "dense/kernel/value": "dense.kernel",
        "dense/bias/value": "dense/bias/value",
    }
    assert match(["params/w", "w"], ["w", "params.w"])[0] == {"w": "w", "params/w": "params.w"}
    with pytest.raises(BadWeights, match="two tensors are meant"):
        match(leaves, ["Dense_0/kernel", "params/Dense_0/kernel"])


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "x" * 65, "ä", "a:b"])
def test_a_version_has_a_plain_name(name):
    with pytest.raises(BadWeights, match="a version's name"):
        check_version(name)
