"""The canary: recorded frames that a version must answer well before it serves a session.

An .npz of
    frames            [n, frame, *sample_shape]: one stream, run from rest; of a model with several
                      inputs frames/<name> of each instead
    <output's name>   [n, frame, ...]: what is expected of it, where that is known
    bound             a number: the largest difference from what is expected; without expectations,
                      the largest magnitude an output may have

Outputs that are not finite are refused in any case, but where such are expected; and so is a state
that holds NaN, which a threshold may hide from the outputs.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.inputs import pack
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.pool import Pool
from slotstream_worker.weights.errors import BadWeights, Refused

SCRATCH_BYTES = 64 * 2**20
"""A scratch pool up to so large has the engine's own size, so that nothing is compiled for it."""

Array = np.ndarray[Any, Any]


class Canary:
    """Recorded frames, checked against a model. Raises `BadWeights` where they do not fit it."""

    def __init__(self, raw: bytes, model: StreamModel) -> None:
        try:
            with np.load(io.BytesIO(raw), allow_pickle=False) as held:
                arrays = {name: held[name] for name in held.files}
        except Exception as error:  # whatever a parser makes of arbitrary bytes
            raise BadWeights(
                f"the canary is no .npz of arrays: {type(error).__name__}: {error}"
            ) from error
        frames = _frames(arrays, model)
        if frames is None:
            raise BadWeights(
                f"the canary's .npz has `frames`, got {', '.join(sorted(arrays)) or 'nothing'}"
            )
        bound = arrays.pop("bound", None)
        if frames.shape[1:] != model.frame_shape or not len(frames):
            raise BadWeights(
                f"the canary's frames are [n, {', '.join(map(str, model.frame_shape))}], got "
                f"{list(frames.shape)}"
            )
        if not np.can_cast(frames.dtype, model.dtype, "same_kind"):
            raise BadWeights(f"the canary's frames are {model.dtype.name}, got {frames.dtype.name}")
        outputs = {o.name: (len(frames), *o.shape) for o in model.outputs}
        for name, array in arrays.items():
            if name not in outputs or array.shape != outputs[name]:
                raise BadWeights(
                    f"the canary expects {name} {list(array.shape)}, and the model gives "
                    + ", ".join(f"{n} {list(s)}" for n, s in outputs.items())
                )
        self.frames: Array = frames.astype(model.dtype)
        self.expected: Mapping[str, Array] = arrays
        self.bound = None if bound is None else float(np.asarray(bound).reshape(()))

    def check(self, engine: Engine, variables: Any) -> None:
        """Run the frames with these variables.

        Runs on a pool of its own, with the launches that sessions are run with; from any thread.

        Raises:
            Refused: an output is not finite where it should be, or leaves the bound; says which.
        """
        for k, outputs in enumerate(self._run(engine, variables)):
            for name, array in outputs.items():
                self._judge(k, name, array)

    def _run(self, engine: Engine, variables: Any) -> list[dict[str, Array]]:
        spec, slots, rows = engine.model.spec, engine.pool.slots, min(engine.row_counts)
        same = (slots + 1) * spec.row_bytes <= SCRATCH_BYTES
        pool = Pool(spec, slots if same else rows, engine.model.rest)
        pool.admit(["canary"])
        ran = []
        for frame in self.frames:
            block = np.zeros((rows, *frame.shape), frame.dtype)
            block[0] = frame
            plan = pool.plan(["canary"], rows=rows)
            launched = engine.launcher.launch(pool, plan, block, variables=variables)
            ran.append({name: array[0] for name, array in launched.wait().items()})
            for leaf, rows_of in zip(spec.leaves, launched.rows, strict=True):
                if np.isnan(_values(np.asarray(rows_of)[0])).any():
                    raise Refused(
                        "verified",
                        f"after the canary's frame {len(ran) - 1} the state {leaf.path} holds NaN",
                    )
            pool.commit([(plan, launched.rows)])
        return ran

    def _judge(self, k: int, name: str, found: Array) -> None:
        wanted = self.expected.get(name)
        if wanted is None:
            values = _values(found)
            if not np.isfinite(values).all():
                raise Refused(
                    "verified", f"the canary's frame {k} gives {name} with NaN or an infinity"
                )
            if self.bound is not None and not self.expected:
                largest = float(np.abs(values).max(initial=0.0))
                if largest > self.bound:
                    raise Refused(
                        "verified",
                        f"the canary's frame {k} gives {name} of magnitude {largest:.6g}, beyond "
                        f"the bound {self.bound:g}",
                    )
            return
        wanted = wanted[k]
        a, b = _values(found), _values(wanted)
        both = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            off = np.where(both, 0.0, np.abs(a - b))
        largest = float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))
        if largest > (self.bound or 0.0):
            raise Refused(
                "verified",
                f"the canary's frame {k} gives {name} off by {largest:.6g} from what is expected, "
                f"and the bound is {self.bound or 0.0:g}",
            )


def _frames(arrays: dict[str, Array], model: StreamModel) -> Array | None:
    """Take the frames out of the canary's arrays."""
    if not model.inputs:
        return arrays.pop("frames", None)
    named = {one.name: arrays.pop(f"frames/{one.name}", None) for one in model.inputs}
    if missing := [name for name, array in named.items() if array is None]:
        raise BadWeights(
            f"the canary's .npz has frames/{missing[0]}, [n, frame, ...], for the model's input of "
            "that name, and this one has not"
        )
    return pack(model.inputs, named)


def _values(array: Array) -> Array:
    """As numbers that NumPy can tell NaN among, whatever the dtype was."""
    wide: Array = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return wide
