"""The cancel script of PROTOCOL.md, on a real Redis."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from slotstream.link import Link
from slotstream.names import Keys

PRODUCER = Path(__file__).resolve().parent.parent / "producer"
SCRIPT = (PRODUCER / "slotstream" / "cancel.lua").read_text(encoding="ascii")
TOP = 2**64 - 1
ROW, INBOX = Keys("demo").row("a"), Keys("demo").inbox("a")


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    client = Link(redis_url, 5.0).client("x")
    yield client
    client.close()


def call(server: redis.Redis, *command: str | int | bytes) -> Any:
    return server.execute_command(*command)  # type: ignore[no-untyped-call]


def push(server: redis.Redis, *entries: str) -> None:
    for entry in entries:
        call(server, "XADD", INBOX, entry, "frame", b"\x80")


def row(server: redis.Redis, **fields: str) -> None:
    for field, value in fields.items():
        server.hset(ROW, field, value)


def cancel(server: redis.Redis, entry: str) -> int:
    answer = call(server, "EVAL", SCRIPT, 2, ROW, INBOX, entry)
    assert isinstance(answer, int)
    return answer


def left(server: redis.Redis) -> list[str]:
    return [entry.decode() for entry, _ in call(server, "XRANGE", INBOX, "-", "+")]


def cuts(server: redis.Redis) -> bytes | None:
    value = call(server, "HGET", ROW, "cuts")
    assert value is None or isinstance(value, bytes)
    return value


@pytest.mark.parametrize("status", ["waiting", "live", "closing"])
def test_an_entry_that_waits_is_cancelled_and_counted(server: redis.Redis, status: str) -> None:
    row(server, status=status, done="2-0", cuts="4")
    push(server, "1-0", "2-0", "3-0", "4-0")
    assert cancel(server, "3-0") == 1
    assert left(server) == ["1-0", "2-0", "4-0"]
    assert cuts(server) == b"5"


@pytest.mark.parametrize("entry", ["1-0", "2-0", "2", "02-00"])
def test_an_entry_that_was_answered_is_refused(server: redis.Redis, entry: str) -> None:
    row(server, status="live", done="2-0", cuts="0")
    push(server, "1-0", "2-0", "3-0")
    assert cancel(server, entry) == -1
    assert left(server) == ["1-0", "2-0", "3-0"]
    assert cuts(server) == b"0"


def test_an_entry_that_is_not_there_changes_nothing(server: redis.Redis) -> None:
    row(server, status="live", done="2-0", cuts="0")
    push(server, "3-0")
    assert cancel(server, "5-0") == 0
    assert cancel(server, "3-0") == 1
    assert cancel(server, "3-0") == 0
    assert cuts(server) == b"1"


def test_without_a_row_it_is_a_plain_delete(server: redis.Redis) -> None:
    assert cancel(server, "1-0") == 0
    push(server, "1-0")
    assert cancel(server, "1-0") == 1
    assert left(server) == []
    assert not server.exists(ROW)


def test_with_a_closed_row_it_is_a_plain_delete(server: redis.Redis) -> None:
    row(server, status="closed", token="t", end="9-0")
    push(server, "1-0")
    assert cancel(server, "1-0") == 1
    assert server.hgetall(ROW) == {b"status": b"closed", b"token": b"t", b"end": b"9-0"}


def test_a_row_that_has_answered_nothing_yet_cancels_anything(server: redis.Redis) -> None:
    row(server, status="waiting")
    push(server, "1-0")
    assert cancel(server, "1-0") == 1
    assert cuts(server) == b"1"


@pytest.mark.parametrize(
    ("done", "entry"),
    [
        ("9-0", "10-0"),  # as text, 10 comes before 9
        ("9-9", "9-10"),
        (f"{2**53}-0", f"{2**53 + 1}-0"),  # as doubles, these two are equal
        (f"7-{2**53}", f"7-{2**53 + 1}"),
        (f"{TOP - 1}-{TOP}", f"{TOP}-0"),
        (f"{TOP}-{TOP - 1}", f"{TOP}-{TOP}"),
        ("5-7", "6-0"),
    ],
)
def test_ids_are_compared_as_whole_numbers(server: redis.Redis, done: str, entry: str) -> None:
    row(server, status="live", done=done)
    push(server, entry)
    assert cancel(server, entry) == 1
    assert cancel(server, done) == -1
    row(server, done=entry)
    assert cancel(server, entry) == -1
    assert cancel(server, done) == -1


@pytest.mark.parametrize("entry", ["", "x", "-", "+", "*", "1-", "-1", "1-2-3", f"{TOP + 1}-0"])
@pytest.mark.parametrize("status", ["live", "closed"])
def test_what_is_no_id_is_an_error_and_changes_nothing(
    server: redis.Redis, entry: str, status: str
) -> None:
    row(server, status=status, done="1-0")
    push(server, "2-0")
    with pytest.raises(redis.ResponseError):
        cancel(server, entry)
    assert left(server) == ["2-0"]
    assert cuts(server) is None


def test_its_keys_are_in_one_slot_of_a_cluster() -> None:
    assert {re.sub(r"\}.*", "}", key) for key in (ROW, INBOX)} == {"{demo:0}"}


@pytest.mark.parametrize("file", ["PROTOCOL.md", "node/cancel.js"])
def test_the_script_is_published_as_it_is(file: str) -> None:
    assert SCRIPT.strip() in (PRODUCER / file).read_text(encoding="ascii")
