"""Whose entries run next: nobody is passed over, nothing twice, and a backlog goes together."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from slotstream_worker.engine.catchup import CatchUp
from slotstream_worker.engine.cover import Cover
from slotstream_worker.entries import Entry
from slotstream_worker.hosted import Hosted
from slotstream_worker.rounds import Round
from slotstream_worker.scheduler import Scheduler

COST_MS = {1: 0.2, 4: 0.3, 16: 0.5, 64: 1.0, 128: 1.6}
ALWAYS = lambda _partition, _session: True  # noqa: E731


class Reader:
    """Entries that are no plain frame hold nothing but an op."""

    frames = SimpleNamespace(usual=lambda payload: payload)

    def read(self, id: bytes, fields: list[bytes]) -> Entry:  # noqa: A002, ARG002
        return Entry(id, None, reset=True)


def scheduler(*, slots: int = 1024, ways: tuple[int, ...] = (16, 64, 128), fresh: Any = ()) -> Any:
    cover = Cover(COST_MS)
    engine: Any = SimpleNamespace(
        round_rows=128,
        catch_up=[CatchUp(rows, 16) for rows in ways],
        pool=SimpleNamespace(slots=slots),
        cost_ms=cover.cost,
    )
    rows: Any = SimpleNamespace(has_state=lambda session: session not in fresh)
    low: list[Hosted] = []
    made = Scheduler(engine, rows, Reader(), low=low.append, low_water=4)  # type: ignore[arg-type]
    return made, low


def session(name: str, entries: int, *, weights: str = "", attempts: int = 0) -> Hosted:
    hosted = Hosted(name, 0, b"1", b"0", b"0-0", b"0-0", weights, attempts=attempts)
    for k in range(entries):
        hosted.queue.append([b"%d-0" % (k + 1), [b"frame", b"%s %d" % (name.encode(), k + 1)]])
    return hosted


def form(made: Scheduler, sessions: int = 1000, *, calm: bool = True) -> Round:
    return made.form(sessions, ALWAYS, calm=calm)


def land(made: Scheduler, formed: Round) -> None:
    for hosted in formed.hosted:
        hosted.in_flight = False
    for hosted, _ in formed.plain:
        hosted.in_flight = False
    made.landed(formed)
    for hosted in [*formed.hosted, *(h for h, _ in formed.plain)]:
        made.add(hosted)


def test_a_backlog_runs_as_many_entries_as_the_first_and_the_last_of_the_launch_have():
    made, _ = scheduler()
    sessions = [session(f"s{k}", 9 if k else 7) for k in range(200)]
    for one in sessions:
        made.add(one)
    formed = form(made)
    assert (formed.depth, len(formed.hosted)) == (7, 128)
    assert formed.hosted[0] is sessions[0]
    assert formed.raws[:7] == [b"s0 %d" % k for k in range(1, 8)]
    assert formed.raws[7:9] == [b"s1 1", b"s1 2"]
    assert formed.ids[:2] == [b"1-0", b"2-0"]
    assert made.in_flight == 128


def test_who_has_one_entry_and_is_first_runs_at_once_and_leaves_the_backlog_whole():
    made, _ = scheduler()
    live, behind = session("live", 1), [session(f"s{k}", 8) for k in range(100)]
    for one in (live, *behind):
        made.add(one)
    first = form(made)
    assert (first.depth, [h.session for h in first.hosted]) == (1, ["live"])
    second = form(made)
    assert second.depth == 8
    assert second.hosted[0] is behind[0]


def test_a_few_with_a_backlog_run_with_all_others_where_that_is_quicker():
    made, _ = scheduler()
    for one in [session(f"s{k}", 2 if k < 10 else 1) for k in range(128)]:
        made.add(one)
    formed = form(made)
    assert (formed.depth, len(formed.hosted)) == (1, 128)


def test_two_of_few_sessions_groups_can_be_under_way():
    made, _ = scheduler()
    for one in [session(f"s{k}", 16) for k in range(100)]:
        made.add(one)
    rounds = [form(made, 100), form(made, 100)]
    assert [(r.depth, len(r.hosted)) for r in rounds] == [(16, 50), (16, 50)]


def test_a_launch_of_several_is_of_one_version_and_of_sessions_that_left_rest():
    fresh = {f"s{k}" for k in range(0, 120, 3)}
    made, _ = scheduler(fresh=fresh)
    sessions = [session(f"s{k}", 6, weights="v1" if k % 2 else "v2") for k in range(120)]
    for one in sessions[1:]:
        made.add(one)
    formed = form(made)
    assert formed.depth > 1
    assert {h.weights for h in formed.hosted} == {"v1"}
    assert not {h.session for h in formed.hosted} & fresh


def test_who_is_behind_waits_to_fill_a_launch_while_others_catch_up_and_no_longer():
    made, _ = scheduler()
    for one in [session(f"s{k}", 16) for k in range(128)]:
        made.add(one)
    first = form(made)
    assert first.depth == 16
    for one in [session(f"t{k}", 4) for k in range(60)]:
        made.add(one)
    assert not form(made), "they are too few while the device is busy"
    lone = session("lone", 1)
    made.add(lone)
    assert form(made).hosted == [lone]
    land(made, first)
    formed = form(made)
    assert formed.depth == 4
    assert len(formed.hosted) == 60


def test_what_failed_together_goes_back_in_front_and_runs_one_by_one():
    made, _ = scheduler()
    sessions = [session(f"s{k}", 5) for k in range(20)]
    for one in sessions:
        made.add(one)
    formed = form(made, 20)
    assert formed.depth > 1
    chosen = list(formed.hosted)
    made.put_back(formed)
    assert (formed.hosted, made.in_flight) == ([], 0)
    made.landed(formed)
    assert made.in_flight == 0
    assert all(len(h.queue) == 5 and not h.even for h in chosen)
    again = form(made, 20)
    assert again.depth == 1
    assert again.hosted[: len(chosen)] == chosen
    assert again.raws[0] == b"s0 1"


def test_a_suspect_runs_alone_once_all_is_calm():
    made, _ = scheduler()
    suspect, other = session("sick", 3, attempts=2), session("sound", 3)
    made.suspect(suspect)
    made.add(suspect)
    made.add(other)
    first = form(made)
    assert first.hosted == [other]
    assert not form(made), "the suspect waits for calm, and all others for the suspect"
    land(made, first)
    assert not form(made, calm=False)
    trial = form(made)
    assert trial.hosted == [suspect]
    made.cleared(suspect)
    land(made, trial)
    assert not form(made, calm=False), "first its answer is published"
    assert {h.session for h in form(made).hosted} == {"sound", "sick"}


@pytest.mark.parametrize("seed", range(30))
def test_every_entry_runs_once_in_order_and_nobody_starves(seed: int):
    rng = random.Random(seed)
    made, _ = scheduler(slots=rng.choice([40, 1024]), ways=rng.choice([(16, 64, 128), (16,), ()]))
    count = rng.choice([3, 20, 100, 300])
    sessions = [session(f"s{k}", 0, weights=rng.choice(["", "", "v"])) for k in range(count)]
    pushed = dict.fromkeys((h.session for h in sessions), 0)
    ran: dict[str, list[bytes]] = {h.session: [] for h in sessions}
    waiting_since: dict[str, int] = {}
    aloft: list[Round] = []

    def push(hosted: Hosted, entries: int) -> None:
        for _ in range(entries):
            pushed[hosted.session] += 1
            id_ = b"%d-0" % pushed[hosted.session]
            odd = rng.random() < 0.01
            hosted.queue.append([id_, [b"op", b"reset"] if odd else [b"frame", b"x"]])
            hosted.even = hosted.even and not odd
        made.add(hosted)

    def note(formed: Round) -> None:
        for k, hosted in enumerate(formed.hosted):
            ran[hosted.session] += formed.ids[k * formed.depth : (k + 1) * formed.depth]
        for hosted, entry in formed.plain:
            ran[hosted.session].append(entry.id)
        names = [h.session for h in formed.hosted] + [h.session for h, _ in formed.plain]
        assert len(set(names)) == len(names)
        assert len({h.weights for h in formed.hosted}) == 1 or formed.depth == 1
        for name in names:
            waiting_since.pop(name, None)

    for turn in range(400):
        busy = turn < 300
        if busy:
            for hosted in rng.sample(sessions, rng.randint(0, max(count // 4, 1))):
                push(hosted, rng.choice([1, 1, 2, 12]))
        if len(aloft) < 2:
            formed = form(made, count)
            if formed:
                if formed.depth > 1 and rng.random() < 0.05:
                    made.put_back(formed)
                    made.landed(formed)
                else:
                    note(formed)
                    aloft.append(formed)
        if aloft and (len(aloft) == 2 or rng.random() < 0.5):
            land(made, aloft.pop(0))
        for hosted in sessions:
            if hosted.runnable:
                waiting_since.setdefault(hosted.session, turn)
        oldest = min(waiting_since.values(), default=turn)
        rounds = 3 * (1 + count // min(made.engine.pool.slots // 2, 60))
        assert turn - oldest < 12 + 4 * rounds, "somebody is passed over"
    while aloft or any(h.queue for h in sessions):
        formed = form(made, count)
        if formed:
            note(formed)
            land(made, formed)
        elif aloft:
            land(made, aloft.pop(0))
        else:
            raise AssertionError("entries wait, and no round is formed")
    assert made.in_flight == 0
    for hosted in sessions:
        assert ran[hosted.session] == [b"%d-0" % (k + 1) for k in range(pushed[hosted.session])]
