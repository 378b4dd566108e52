"""How the answers to entries are written. No Redis, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgpack
import numpy as np

from slotstream.arguments import argument, around
from slotstream.codec import encode, header
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.entries import Entry
from slotstream_worker.store.commits import Answer, Outputs


class AnswerWriter:
    """Writes the answers of one model: encoded outputs, and the fields of `out` entries."""

    def __init__(self, model: StreamModel) -> None:
        self._outputs, self._single = model.outputs, model.single
        packer = msgpack.Packer()
        parts: list[bytes] = [] if model.single else [packer.pack_map_header(len(model.outputs))]
        self._layout: list[tuple[str, int, int]] = []  # name, and where its data begin and end
        at = sum(map(len, parts))
        for output in model.outputs:
            head = header(output.dtype, output.shape)
            if not model.single:
                head = packer.pack(output.name) + head
            nbytes = prod(output.shape) * output.dtype.itemsize
            parts += [head, bytes(nbytes)]
            self._layout.append((output.name, at + len(head), at + len(head) + nbytes))
            at += len(head) + nbytes
        self._body = b"".join(parts)
        self._templates: dict[int, tuple[np.ndarray[Any, Any], int]] = {}

    def outputs(
        self, ids: Sequence[bytes], outputs: Mapping[str, np.ndarray[Any, Any]]
    ) -> list[Outputs]:
        """The answers of entries that were frames and nothing else, one a row.

        All rows at once: what is sent of fixed shapes, and of ids of one length, differs only in
        its data.

        Args:
            ids: of the entries.
            outputs: arrays `[rows, frame, ...]` by name.
        """
        if len(set(map(len, ids))) == 1:
            return split((ids, self._packed(ids, outputs)))
        places: dict[int, list[int]] = {}
        for k, id_ in enumerate(ids):
            places.setdefault(len(id_), []).append(k)
        found: dict[int, Outputs] = {}
        for part in places.values():
            chosen = {name: array[part] for name, array in outputs.items()}
            found.update(zip(part, self.outputs([ids[k] for k in part], chosen), strict=True))
        return [found[k] for k in range(len(ids))]

    def runs(
        self, ids: Sequence[bytes], outputs: Mapping[str, np.ndarray[Any, Any]], depth: int
    ) -> list[list[Outputs]]:
        """The same where `depth` rows in turn are of one session: the answers of each."""
        if len(set(map(len, ids))) == 1:
            return [[run] for run in split((ids, self._packed(ids, outputs)), depth)]
        each = self.outputs(ids, outputs)
        return [each[k : k + depth] for k in range(0, len(ids), depth)]

    def _packed(self, ids: Sequence[bytes], outputs: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
        """What is sent of answers whose ids are of one length."""
        rows, length = len(ids), len(ids[0])
        template, start = self._template(length)
        block = np.empty((rows, len(template)), np.uint8)
        block[:] = template
        named = np.frombuffer(b"".join(ids), np.uint8).reshape(rows, length)
        block[:, start : start + length] = named
        shift = self._shift(length)
        for name, low, high in self._layout:
            if low == high:
                continue
            array = np.ascontiguousarray(outputs[name])
            part = array.reshape(rows, -1).view(np.uint8).reshape(rows, -1)
            block[:, shift + low : shift + high] = part
        return block.tobytes()

    def _template(self, length: int) -> tuple[np.ndarray[Any, Any], int]:
        """What is sent of an answer whose id has so many bytes, and where in it the id begins."""
        known = self._templates.get(length)
        if known is None:
            packed = argument(bytes(length)) + argument(self._body)
            known = np.frombuffer(packed, np.uint8), len(around(length)[0])
            self._templates[length] = known
        return known

    def _shift(self, length: int) -> int:
        """Where the encoded output begins in what is sent of an answer."""
        return sum(map(len, around(length))) + length + len(around(len(self._body))[0])

    def raw(self, answer: Outputs) -> bytes:
        """The encoded output of one answer that was packed."""
        (id_,), packed = answer
        start = self._shift(len(id_))
        return packed[start : start + len(self._body)]

    def cut(self, outputs: Mapping[str, np.ndarray[Any, Any]], row: int, steps: int) -> bytes:
        """The encoded outputs of one row of a launch, of whose frame only `steps` were real."""
        arrays = {
            output.name: outputs[output.name][row][:steps]
            if output.timed
            else outputs[output.name][row]
            for output in self._outputs
        }
        return encode(next(iter(arrays.values())) if self._single else arrays)

    def answers(self, answers: Sequence[Outputs | Answer], weights: str) -> list[Answer]:
        """Answers one by one, of those that were packed too."""
        found = []
        for answer in answers:
            if isinstance(answer, Answer):
                found.append(answer)
                continue
            for one in split(answer):
                fields = ("output", self.raw(one), "weights", weights)
                found.append(Answer(one[0][0], fields))
        return found

    def output(self, entry: Entry, output: bytes, weights: str) -> Answer:
        """The answer of an entry whose frame ran, from its encoded output."""
        fields: tuple[bytes | str, ...] = ("output", output, "weights", weights)
        return Answer(entry.id, (*fields, "op", "reset") if entry.reset else fields)

    def op(self, entry: Entry) -> Answer:
        """The answer of an entry that holds an op, or only an end."""
        return Answer(entry.id, ("op", "reset") if entry.reset else (), effect=entry.reset)

    def error(self, entry: Entry, code: str, message: str) -> Answer:
        """The answer of an entry that changed nothing."""
        raw = msgpack.packb({"code": code, "message": message[:500]})
        return Answer(entry.id, ("error", raw), effect=False)


def split(outputs: Outputs, depth: int = 1) -> list[Outputs]:
    """Answers that were packed together, `depth` at a time."""
    ids, packed = outputs
    step = len(packed) * depth // len(ids)
    starts = zip(range(0, len(ids), depth), range(0, len(packed), step), strict=True)
    return [(ids[k : k + depth], packed[at : at + step]) for k, at in starts]
