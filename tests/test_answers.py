"""Answers that are packed many at a time say what each would have said by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serving_models import filters, gru
from slotstream.arguments import argument
from slotstream.codec import encode
from slotstream_worker.answers import AnswerWriter, split
from slotstream_worker.store.commits import Answer, Batch, fence

IDS = {
    "of one length": [b"170000000%04d-0" % k for k in range(12)],
    "of several": [b"1700000000000-%d" % (k + 4) for k in range(12)],
}


@pytest.mark.parametrize("depth", [1, 4, 12])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize("make", [gru, filters])
def test_answers_are_packed_as_one_by_one(make: Any, ids: list[bytes], depth: int):
    model, rng = make(), np.random.default_rng(0)
    arrays = {
        one.name: rng.normal(size=(len(ids), *one.shape)).astype(one.dtype) for one in model.outputs
    }
    expected = []
    for k, id_ in enumerate(ids):
        row = {name: array[k] for name, array in arrays.items()}
        raw = encode(row["output"] if model.single else row)
        expected.append(Answer(id_, ("output", raw, "weights", "v1")))

    writer = AnswerWriter(model)
    sessions = writer.runs(ids, arrays, depth)
    if depth == 1:
        each = [[(list(named), packed)] for named, packed in writer.outputs(ids, arrays)]
        assert each == [[(list(named), packed) for named, packed in some] for some in sessions]
    assert len(sessions) == 12 // depth
    assert [a for some in sessions for a in writer.answers(some, "v1")] == expected
    for some in sessions:
        for named, packed in some:
            assert len(set(map(len, named))) == 1
            assert split((named, packed)) == [
                ([one.id], argument(one.id) + argument(one.fields[1]))
                for one in expected
                if one.id in named
            ]

    # In a call, they count as that many replies.
    batch = Batch("v1", model.spec.layout)
    for k, some in enumerate(sessions):
        batch.add_usual(
            f"s{k}", fence(f"s{k}", b"77", b"0"), b"0-0", some, b"row" if k == 0 else None
        )
    sent = b"".join(batch.args.parts)
    assert batch.args.count == 5 * len(sessions) + 2 * 12 + 1
    assert sent.count(argument(b"%d" % depth)) == len(sessions) - 1
    assert sent.count(argument(b"+%d" % depth)) == 1
    for one in expected:
        assert argument(one.id) + argument(one.fields[1]) in sent
