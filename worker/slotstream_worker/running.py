"""Rounds on the device: launched, waited for, and run again in parts where one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from slotstream_worker.engine.engine import Engine, Failed, Ran
from slotstream_worker.engine.pool import Session
from slotstream_worker.engine.rows import Rows
from slotstream_worker.entries import EntryReader, Frames
from slotstream_worker.rounds import Flying, Round
from slotstream_worker.weights.residents import Residents

log = logging.getLogger(__name__)


class Runner:
    """Runs the rounds of one engine.

    Args:
        engine: what runs them.
        rows: seats a round's sessions.
        reader: reads their frames.
        residents: says which weights each runs with.
        busy: whether a session is in a round under way.
        put_back: takes the entries of a round of several frames back, to run one by one.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Rows,
        reader: EntryReader,
        residents: Residents,
        *,
        busy: Callable[[Session], bool],
        put_back: Callable[[Round], None],
    ) -> None:
        self.engine, self.rows, self.reader = engine, rows, reader
        self.frames, self.residents = reader.frames, residents
        self._busy, self._put_back = busy, put_back

    def launch(self, formed: Round) -> Flying:
        """Start a round; the device computes while the caller does something else.

        Entries whose frame turns out to be none go to those that need no device.
        """
        if not formed.hosted:
            return Flying(formed, [], np.empty(0), set(), None)
        frames, others = self.reader.frames_of(formed.raws)
        if formed.depth > 1:
            return self._launch_several(formed, frames, others)
        if others:
            frames = self._sort_out(formed, frames, others)
        names = [hosted.session for hosted in formed.hosted]
        from_rest = {names[k] for k, entry in formed.entries.items() if entry.reset}
        flying = Flying(formed, names, frames, from_rest, None)
        if not names:
            return flying
        try:
            self.rows.seat(names, self._busy)
            steps = formed.steps(self.frames.shape[0])
            weights = self.residents.of(formed.hosted)
            flight = self.engine.begin(
                names, frames, from_rest=from_rest, steps=steps, weights=weights
            )
        except Exception:
            log.exception("a round of %d frames could not be launched", len(names))
            return flying  # `outcomes` runs it again, halved until each failure stands alone
        return Flying(formed, names, frames, from_rest, flight)

    def _launch_several(self, formed: Round, frames: Frames, others: Sequence[int]) -> Flying:
        flight, names = None, [hosted.session for hosted in formed.hosted]
        if not others:
            try:
                self.rows.seat(names, self._busy)
                shape = (len(names), formed.depth, *self.frames.shape)
                weights = formed.hosted[0].weights
                flight = self.engine.begin_far(names, frames.reshape(shape), weights)
            except Exception:
                log.exception("a round of %d sessions could not be launched", len(names))
        if flight is None:
            self._put_back(formed)
            return Flying(formed, [], frames, set(), None)
        return Flying(formed, names, frames, set(), flight)

    def _sort_out(self, formed: Round, frames: Frames, others: Sequence[int]) -> Frames:
        """Read the frames that are not encoded as usual; those that are none leave the round."""
        frames = frames.copy()
        bad = set()
        for k in others:
            raw = formed.raws[k]
            entry = formed.entries.get(k) or self.reader.read(formed.ids[k], [b"frame", raw])
            if entry.payload is None:
                bad.add(k)
                formed.plain.append((formed.hosted[k], entry))
            else:
                data = np.frombuffer(entry.payload, self.frames.dtype)
                frames[k] = data.reshape(self.frames.shape)
        if not bad:
            return frames
        keep = [k for k in range(len(formed.hosted)) if k not in bad]
        formed.keep(keep)
        return frames[keep]

    def outcomes(self, flying: Flying) -> Iterable[Ran | Failed]:
        """Wait for a round: what each launch gave, or each frame that raised when it ran alone."""
        formed = flying.round
        if flying.flight is not None:
            try:
                return self.engine.finish(flying.flight)
            except Exception:
                log.exception("a round of %d sessions failed; it is run again", len(flying.names))
            if formed.depth > 1:
                self._put_back(formed)
                return ()
        if not flying.names:
            return ()
        keep = [k for k, hosted in enumerate(formed.hosted) if not hosted.gone]
        names = [flying.names[k] for k in keep]
        steps = formed.steps(self.frames.shape[0])
        return self.engine.isolate(
            names,
            flying.frames[keep],
            from_rest=flying.from_rest,
            positions=keep,
            steps=[steps[k] for k in keep] if steps else None,
            weights=[formed.hosted[k].weights for k in keep],
        )
