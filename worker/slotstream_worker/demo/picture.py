"""The demo's picture: what one session heard, how its neurons fired, whom it recognised."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt

from slotstream_worker.demo.outcome import Outcome, Session

_CRASH = "#d62728"


def draw(
    path: Path, outcome: Outcome, times: list[float], killed_at: float | None, back_at: float | None
) -> None:
    """Draw one session's input, spikes and scores, and all sessions' replies over the run."""
    session = _shown(outcome)
    steps = len(session.served["scores"])
    figure, (heard, raster, scores, run) = plt.subplots(
        4, 1, figsize=(9, 11), height_ratios=(2, 3.2, 2.4, 1.8), layout="constrained"
    )
    time = np.arange(steps)

    image = heard.imshow(
        session.utterance.steps[:steps].T,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        extent=(-0.5, steps - 0.5, -0.5, 11.5),
    )
    heard.set(
        ylabel="cepstrum channel",
        title=f"input of {session.name}, speaker {session.utterance.speaker + 1}",
    )
    figure.colorbar(image, ax=heard, pad=0.01)

    at, neuron = np.nonzero(session.served["spikes"])
    raster.scatter(at, neuron, s=5, marker="|", color="black", linewidths=0.9)
    raster.set(
        ylabel="neuron",
        xlim=(-0.5, steps - 0.5),
        ylim=(-1, session.served["spikes"].shape[1]),
        title=f"spikes of its {session.served['spikes'].shape[1]} neurons, as served",
    )

    for speaker, line in enumerate(session.served["scores"].T):
        right = speaker == session.utterance.speaker
        scores.plot(
            time,
            line,
            color="#1f77b4" if right else "#bbbbbb",
            linewidth=2.2 if right else 1.0,
            zorder=3 if right else 2,
            label=f"speaker {speaker + 1}, the one who speaks"
            if right
            else "the other eight"
            if speaker == (session.utterance.speaker + 1) % 9
            else None,
        )
    gap = np.abs(session.served["scores"] - session.direct["scores"]).max()
    scores.set(
        ylabel="score",
        xlabel="frame of the recording",
        xlim=(-0.5, steps - 0.5),
        title=f"scores over time (largest difference from a direct call: {gap:.3g})",
    )

    if session.crash_step is not None and killed_at is not None:
        for axes in (heard, raster, scores):
            axes.axvline(
                session.crash_step - 0.5,
                color=_CRASH,
                linestyle="--",
                linewidth=1.6,
                label="worker killed here" if axes is scores else None,
            )
    scores.legend(loc="center right", fontsize=8)

    run.plot(times, np.arange(1, len(times) + 1), color="#2ca02c", linewidth=2)
    if killed_at is not None:
        run.axvspan(killed_at, back_at or times[-1], color=_CRASH, alpha=0.15, linewidth=0)
        run.text(
            killed_at,
            0.94 * len(times),
            " SIGKILL, then a new process",
            color=_CRASH,
            va="top",
            fontsize=8,
        )
    run.set(
        xlabel="seconds",
        ylabel="replies",
        ylim=(0, None),
        xlim=(0, None),
        title=f"all {len(outcome.sessions)} sessions: {outcome.replies:,} replies, "
        f"{outcome.lost} lost, {outcome.duplicated} twice",
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _shown(outcome: Outcome) -> Session:
    """A long recording that the crash fell into the middle of, rightly classified."""

    def interest(session: Session) -> tuple[bool, float, int]:
        scores = session.served["scores"]
        right = bool(len(scores)) and scores.mean(axis=0).argmax() == session.utterance.speaker
        middle = min(session.crash_step or 0, len(scores) - (session.crash_step or 0))
        return (right, middle, len(scores))

    return max(outcome.sessions, key=interest)
