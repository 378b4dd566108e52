"""What is read of streams is what a client library reads, however it comes in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis
from redis.exceptions import ResponseError

from slotstream.lines import Line
from slotstream_worker.backlog import Backlog
from slotstream_worker.store.reading import StreamsLine
from slotstream_worker.store.runs import Raw, Read, Run, entries_of


class Trickle(StreamsLine):
    """A connection on which no more than `most` bytes come at a time."""

    most = 2**30

    def _receive_into(self, buffer: Any) -> int:
        return super()._receive_into(memoryview(buffer)[: self.most])


@pytest.fixture
def pool(redis_url: str) -> Iterator[redis.ConnectionPool]:
    made = redis.ConnectionPool.from_url(redis_url, protocol=2)
    yield made
    made.disconnect()


@pytest.fixture
def line(pool: redis.ConnectionPool) -> Iterator[Trickle]:
    made = Trickle(pool)
    yield made
    made.close()


@pytest.fixture
def plain(pool: redis.ConnectionPool) -> Iterator[Line]:
    made = Line(pool)
    yield made
    made.close()


def xread(line: StreamsLine, *command: Any) -> Any:
    line.read("XREAD", *command)
    return line.receive()


def one_by_one(answer: Any) -> Any:
    return answer and [[key, entries_of(parts)] for key, parts in answer]


def lengths(parts: list[Read]) -> list[int]:
    """Entries of each run; 0 for an entry by itself."""
    return [len(part) if isinstance(part, Run) else 0 for part in parts]


def frame(rng: random.Random, size: int) -> bytes:
    return rng.randbytes(size)


@pytest.mark.parametrize("seed", range(25))
def test_any_streams_read_as_with_a_client_library(line: Trickle, plain: Line, seed: int):
    rng = random.Random(seed)
    keys = [f"in:{'x' * rng.choice([1, 9, 130])}{k}" for k in range(rng.randint(1, 9))]
    forged = b"\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$5\r\nframe\r\n$4\r\nabcd\r\n"
    at = 1
    for _ in range(rng.randint(1, 150)):
        key, size = rng.choice(keys), rng.choice([24, 24, 24, 24, 200, 0, 5000])
        raw = frame(rng, size)
        if size >= 200 and rng.random() < 0.3:
            raw = forged + raw[len(forged) :]
        fields: list[Any] = rng.choice(
            [["frame", raw]] * 12
            + [["op", "reset"], ["frame", raw, "end", "1"], ["end", "1", "frame", raw]]
            + [["Frame", raw], ["frame", raw, "frame", raw], ["", ""], ["frames", raw]]
        )
        at += rng.choice([1, 1, 1, 1, 90])
        id_ = f"{at // 10 + 10 ** rng.choice([3, 3, 3, 12])}-{at}"
        last = plain.call("XREVRANGE", key, "+", "-", "COUNT", 1)
        if not last or tuple(map(int, last[0][0].split(b"-"))) < tuple(map(int, id_.split("-"))):
            plain.call("XADD", key, id_, *fields)
    for count in (1, 2, 5, 100):
        command = ("COUNT", count, "STREAMS", *keys, *["0"] * len(keys))
        expected = plain.call("XREAD", *command)
        for most in (2**30, rng.choice([1, 2, 3]), rng.randint(4, 80), rng.randint(81, 4000)):
            if most < 4 and len(str(expected)) > 60_000:
                most *= 40
            line.most = most
            assert one_by_one(xread(line, *command)) == expected
        assert line.call("ECHO", "still in step") == b"still in step"


def test_frames_of_one_size_are_read_as_runs_and_others_by_themselves(line: Trickle, plain: Line):
    rng = random.Random(0)
    sizes = [40] * 8 + [41] * 3 + [40]
    for k, size in enumerate(sizes):
        plain.call("XADD", "in", f"7-{k + 1}", "frame", frame(rng, size))
    plain.call("XADD", "in", "8-0", "op", "reset")
    for k in range(4):
        plain.call("XADD", "in", f"9-{k}", "frame", frame(rng, 40))
    ((_, parts),) = xread(line, "STREAMS", "in", "0")
    # 7-9 and 7-10 are of one size, and their ids are not.
    assert lengths(parts) == [8, 0, 2, 0, 0, 4]
    run = parts[0]
    assert [raw.tobytes() for raw in run.frames(2, 3)] == [run.entry(k)[1][1] for k in (2, 3, 4)]
    assert [run.entry(k) for k in range(8)] == run.entries() == entries_of([run])


def test_an_answer_larger_than_the_buffer_and_many_after_it(line: Trickle, plain: Line):
    rng = random.Random(1)
    big = [frame(rng, 700_000) for _ in range(12)]
    for k, raw in enumerate(big):
        plain.call("XADD", "big", f"{k + 1}-0", "frame", raw)
    for _ in range(2):
        ((_, parts),) = xread(line, "COUNT", 12, "STREAMS", "big", "0")
        assert [fields for _, fields in entries_of(parts)] == [[b"frame", raw] for raw in big]
        for k in range(11):
            ((_, parts),) = xread(line, "COUNT", 4, "STREAMS", "big", f"{k}-0")
            assert entries_of(parts)[0] == [b"%d-0" % (k + 1), [b"frame", big[k]]]


def test_an_error_and_no_answer_are_those_of_any_command(line: Trickle, plain: Line):
    plain.call("SET", "text", "x")
    for most in (2**30, 1):
        line.most = most
        assert xread(line, "STREAMS", "nobody", "0") is None
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            xread(line, "STREAMS", "text", "0")
        for k in range(5):
            plain.call("XADD", "some", "*", "frame", b"%d" % k)
        ((_, parts),) = xread(line, "STREAMS", "some", "0")
        assert [fields[1] for _, fields in entries_of(parts)] == [b"%d" % k for k in range(5)]
        plain.call("DEL", "some")


@pytest.mark.parametrize("seed", range(20))
def test_a_backlog_gives_back_what_was_put_in_whatever_way_it_is_taken(seed: int):
    rng = random.Random(seed)
    backlog, expected, made = Backlog(), list[Raw](), 0
    for _ in range(300):
        act = rng.choice(["extend", "extend", "pop", "take", "put back", "clear"])
        if act == "extend":
            entries: list[Raw] = []
            for _ in range(rng.randint(1, 20)):
                made += 1
                entries.append([b"%d-0" % made, [b"frame", b"%08d" % made]])
            expected += entries
            parts: list[Read] = []
            while entries:
                n = rng.randint(1, len(entries))
                some, entries = entries[:n], entries[n:]
                data = b"".join(b"#%b." % fields[1] for _, fields in some)
                parts += [Run([i for i, _ in some], data, 10, 1, 8)] if n > 1 else some
            backlog.extend(parts, sum(len(p) if isinstance(p, Run) else 1 for p in parts))
        elif act == "pop" and expected:
            assert backlog.pop() == expected.pop(0)
        elif act in ("take", "put back") and expected:
            n = rng.randint(1, len(expected))
            ids: list[bytes] = []
            frames: list[np.ndarray[Any, Any]] = []
            backlog.take(n, ids, frames)
            taken = [[i, [b"frame", raw.tobytes()]] for i, raw in
                     zip(ids, np.concatenate(frames), strict=True)]  # fmt: skip
            assert taken == expected[:n]
            if act == "put back":
                backlog.put_back(taken)
            else:
                del expected[:n]
        elif act == "clear" and rng.random() < 0.1:
            backlog.clear()
            expected.clear()
        assert (len(backlog), list(backlog)) == (len(expected), expected)
