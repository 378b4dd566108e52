"""Commits as workers make them, of sessions they hold or have lost, and ones that are wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slot_table.model import Model
from slot_table.row import fold
from slot_table.store import WORKERS, error
from slotstream.ids import ZERO, EntryId
from slotstream_worker.store.table import Answer, Checkpoint, Commit


@dataclass
class View:
    """A session as a worker believes to hold it; it may have lost it long ago."""

    worker: str
    session: str
    epoch: bytes
    cuts: bytes
    base: EntryId
    state: bytes
    before: EntryId = ZERO
    stale: bool = False


@dataclass(frozen=True)
class Composed:
    """A commit, who sends it, of which view, and the state its view has after it."""

    worker: str
    view: View
    commit: Commit
    state: bytes


WEIGHTS, LAYOUT = "w9", "l1"
"""What made all outputs. A call that names them has a short way for commits of outputs alone."""


def answered(model: Model, view: View, most: int, fail: int) -> Composed:
    """Answers to what waits for the view's worker, an end where it comes to one.

    Args:
        view: whose entries.
        most: how many answers.
        fail: a bit for each answer that is an error though its frame is good.
    """
    answers: list[Answer] = []
    state, action, reason, mark = view.state, "", "", ""
    for k, (entry, fields) in enumerate(model.slots[view.session].behind(view.base).items()):
        if k == most:
            break
        if "op" in fields:
            action, reason, mark = "end", "close", str(entry)
            break
        effect = fields["frame"] == "ok" and not fail >> k & 1
        reply = ("output", fields["frame"], "weights", WEIGHTS) if effect else (
            "error", error("launch"))  # fmt: skip
        answers.append(Answer(entry, reply, effect))
        state = fold(state, entry) if effect else state
        if "end" in fields:
            action, reason = "end", "end"
            break
    commit = Commit(view.session, view.epoch, view.cuts, view.base, tuple(answers),
                    None, action, reason, mark)  # fmt: skip
    return Composed(view.worker, view, commit, state)


def saved(one: Composed) -> Composed:
    """The same with a checkpoint, where it is not an end."""
    if one.commit.action == "end":
        return one
    # Half of them of the weights that the outputs are of, which is the usual checkpoint.
    of = WEIGHTS if len(one.commit.answers) % 2 else f"w{len(one.commit.answers)}"
    checkpoint = Checkpoint(one.state, LAYOUT, of)
    return replace(one, commit=replace(one.commit, checkpoint=checkpoint))


def spoilt(one: Composed, wrong: str) -> Composed:
    """The same from who does not own the session, or did, or is not as far with it."""
    commit, sender = one.commit, one.worker
    base, answers = commit.base, commit.answers
    match wrong:
        case "epoch":
            commit = replace(commit, epoch=str(int(commit.epoch) - 1).encode())
        case "owner":
            sender = WORKERS[WORKERS.index(sender) - 1]
        case "cuts":
            # One more would be right after a cancellation, which it must not survive.
            commit = replace(commit, cuts=str(int(commit.cuts) - 1).encode())
        case "earlier":
            commit = replace(commit, base=one.view.before)
        case "before":
            low = EntryId(base.ms, base.seq - 1) if base.seq else EntryId(max(base.ms - 1, 0))
            commit = replace(commit, base=low)
        case "later":
            high = answers[0].id if len(answers) > 1 else base.next()
            commit = replace(commit, base=high)
    return replace(one, worker=sender, commit=commit)


def described(commit: Commit) -> str:
    """A commit in a few words."""
    parts = [f"{answer.id}{'' if answer.effect else ' (error)'}" for answer in commit.answers]
    parts += ["checkpoint"] if commit.checkpoint else []
    parts += [f"{commit.action} {commit.reason}".strip()] if commit.action else []
    return (f"{commit.session} on {commit.base}, epoch {commit.epoch.decode()}, cuts "
            f"{commit.cuts.decode()}: {', '.join(parts) or 'nothing'}")  # fmt: skip
