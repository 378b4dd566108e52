"""What came of the demo: every reply compared with a direct call of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from slotstream import Reply
from slotstream_worker.demo.serving import model
from slotstream_worker.demo.vowels import Utterance, pad

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Session:
    """One recording: what was served, what a direct call gives, and when the crash came.

    `served` and `direct` hold `scores` [steps, 9] and `spikes` [steps, 256]; `crash_step` is how
    many of its replies had come when the worker was killed.
    """

    name: str
    utterance: Utterance
    served: Arrays
    direct: Arrays
    crash_step: int | None


@dataclass(frozen=True)
class Outcome:
    """The demo's figures. `lost`, `duplicated` and `difference` should be 0."""

    sessions: list[Session]
    frames: int
    replies: int
    lost: int
    duplicated: int
    errors: int
    elapsed_s: float
    latencies_ms: np.ndarray[Any, Any]

    @classmethod
    def of(
        cls,
        utterances: Mapping[str, Utterance],
        replies: Mapping[str, list[Reply]],
        at_kill: Mapping[str, int],
        elapsed_s: float,
    ) -> Outcome:
        """Compare every reply with one direct call over its whole recording."""
        direct = _direct(list(utterances.values()))
        sessions, lost, duplicated, errors = [], 0, 0, 0
        for (name, one), whole in zip(utterances.items(), direct, strict=True):
            got = replies.get(name, [])
            ids = [reply.id for reply in got]
            duplicated += len(ids) - len(set(ids)) + max(len(set(ids)) - len(one.steps), 0)
            lost += max(len(one.steps) - len(set(ids)), 0)
            errors += sum(reply.error is not None for reply in got)
            outputs = [reply.output for reply in got if isinstance(reply.output, dict)]
            served = (
                {key: np.concatenate([o[key] for o in outputs]) for key in whole}
                if outputs
                else {key: value[:0] for key, value in whole.items()}
            )
            sessions.append(
                Session(name, one, served, whole, at_kill.get(name) if at_kill else None)
            )
        every = [reply for got in replies.values() for reply in got]
        waits = [1e3 * r.latency_s for r in every if r.latency_s is not None]
        return cls(
            sessions,
            sum(len(one.steps) for one in utterances.values()),
            len(every),
            lost,
            duplicated,
            errors,
            elapsed_s,
            np.asarray(waits),
        )

    @property
    def difference(self) -> float:
        """Largest difference of any score, or spike, from the direct call."""
        gaps = [
            np.abs(s.served[key].astype(np.float64) - s.direct[key]).max(initial=0.0)
            for s in self.sessions
            for key in s.direct
            if s.served[key].shape == s.direct[key].shape
        ]
        return float(max(gaps, default=np.inf))

    @property
    def right(self) -> bool:
        """Whether nothing was lost, came twice, or differs by more than rounding."""
        whole = all(s.served["scores"].shape == s.direct["scores"].shape for s in self.sessions)
        return (
            not (self.lost or self.duplicated or self.errors) and whole and self.difference < 1e-4
        )

    def accuracy(self, which: str) -> float:
        """Share of recordings whose scores, averaged over time, name their speaker."""
        named = [
            getattr(s, which)["scores"].mean(axis=0).argmax() == s.utterance.speaker
            for s in self.sessions
            if len(getattr(s, which)["scores"])
        ]
        return float(np.mean(named)) if named else 0.0


def _direct(utterances: list[Utterance]) -> list[Arrays]:
    """The model called directly, once, over all whole recordings side by side."""
    served, padded = model(), pad(utterances)
    outputs, _ = jax.jit(served.apply)(
        served.variables, None, jnp.asarray(np.moveaxis(padded.x, 0, 1))
    )
    arrays = {key: np.asarray(value) for key, value in outputs.items()}
    # What follows a recording's end is padding; a causal model's steps before do not see it.
    return [
        {key: value[: len(one.steps), k] for key, value in arrays.items()}
        for k, one in enumerate(utterances)
    ]


def show(
    console: Console, outcome: Outcome, calm_ms: Sequence[float], outage_s: float | None
) -> None:
    """Print the figures as a table.

    Args:
        console: where to.
        outcome: what came of the run.
        calm_ms: latencies of the frames that did not meet the outage.
        outage_s: the silence after the kill, where there was one.
    """
    table = Table(
        title="one spiking network, one copy of its state a recording",
        title_justify="left",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")

    def zero(n: int) -> str:
        return f"[green]{n}[/]" if n == 0 else f"[bold red]{n}[/]"

    table.add_row("sessions", f"{len(outcome.sessions):,}")
    table.add_row("frames", f"{outcome.frames:,}")
    table.add_row("replies", f"{outcome.replies:,}")
    table.add_row("lost", zero(outcome.lost))
    table.add_row("duplicated", zero(outcome.duplicated))
    table.add_row("error replies", zero(outcome.errors))
    table.add_section()
    table.add_row("accuracy, served", f"{100 * outcome.accuracy('served'):.2f} %")
    table.add_row("accuracy, called directly", f"{100 * outcome.accuracy('direct'):.2f} %")
    table.add_row("largest difference from the direct call", f"{outcome.difference:.3g}")
    table.add_section()
    table.add_row(
        "frames a second" + (", the outage included" if outage_s else ""),
        f"{outcome.replies / outcome.elapsed_s:,.0f}",
    )
    calm = ", frames that met the outage left out" if outage_s else ""
    p50, p99 = np.percentile(calm_ms, [50, 99])
    table.add_row(f"push to reply, p50{calm}", f"{p50:,.1f} ms")
    table.add_row(f"push to reply, p99{calm}", f"{p99:,.1f} ms")
    if outage_s:
        p50, p99 = np.percentile(outcome.latencies_ms, [50, 99])
        table.add_row("push to reply, p50, all frames", f"{p50:,.1f} ms")
        table.add_row("push to reply, p99, all frames", f"{p99:,.1f} ms")
        table.add_row("silence while the worker restarted", f"{outage_s:.1f} s")
    console.print(table)
