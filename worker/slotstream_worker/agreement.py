"""How a worker joins an app: the same row counts as the others, and the same bits.

The first worker writes what it found; every other takes those row counts, runs the same probe
and compares. Two machines can each agree within themselves and differ from one another, and a
replay on the other one would then not be exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from slotstream.lines import Line
from slotstream.names import config_key
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.engine import Engine
from slotstream_worker.store import appconfig
from slotstream_worker.store.appconfig import AppConfig, Disagreement
from slotstream_worker.store.partition import Partition

log = logging.getLogger(__name__)


def agree(
    line: Line,
    config: WorkerConfig,
    engine: Engine,
    partition: Partition,
    progress: Callable[[int], None],
) -> bool:
    """Prepare the engine as the app's other workers have; returns whether the bits agree.

    Raises:
        Disagreement: the app is configured for something else, and sessions or workers rely on
            that.
    """
    held = appconfig.read(line, config.app)
    shared = appconfig.row_counts(held)
    if config.row_counts and shared and config.row_counts != shared and _in_use(partition):
        raise Disagreement(
            f"--row-counts {_list(config.row_counts)} was asked for, and the "
            f"workers of app {config.app} launch with {_list(shared)}; leave the "
            "option out"
        )
    probed = engine.prepare(config.row_counts or shared or None, progress=progress)
    model = engine.model
    mine = AppConfig(
        frame=model.frame,
        sample_shape=model.sample_shape,
        dtype=model.dtype.name,
        outputs={o.name: (o.dtype.name, o.shape) for o in model.outputs},
        row_counts=shared or probed.row_counts,
        probe=f"{model.weights}:{probed.digest}",
        max_frame_bytes=config.max_frame_bytes,
    )
    now = appconfig.write(line, config.app, mine)
    differing = appconfig.differences(now, mine)
    if differing and not _in_use(partition):
        # Nothing depends on the old configuration any more: this worker is the first again.
        log.info("app %s is configured anew: %s", config.app, "; ".join(differing))
        line.call("DEL", config_key(config.app))
        if config.row_counts == () and shared:
            probed = engine.prepare(progress=progress)
        mine = AppConfig(
            **{
                **mine.__dict__,
                "row_counts": probed.row_counts,
                "probe": f"{model.weights}:{probed.digest}",
            }
        )
        differing = appconfig.differences(appconfig.write(line, config.app, mine), mine)
    if not differing:
        return True
    same_weights = now.get("probe", "").startswith(model.weights + ":")
    if all(line.startswith("probe:") for line in differing) and same_weights:
        if config.allow_inexact:
            log.warning(
                "this machine's bits differ from those of app %s (%s); a session that "
                "moves here is continued, but not bit for bit",
                config.app,
                differing[0],
            )
            return False
        raise Disagreement(
            f"this machine computes other bits than the first worker of app {config.app} "
            f"({differing[0]}), so a session that moves here would not go on exactly. Run workers "
            "of one app on the same kind of device, or say --allow-inexact"
        )
    raise Disagreement(
        f"app {config.app} is configured for another model, and sessions or workers rely on it:\n  "
        + "\n  ".join(differing)
        + "\nServe that model, choose another --app, or close the "
        "sessions and stop the workers first"
    )


def _in_use(partition: Partition) -> bool:
    """Whether a session is open or another worker alive."""
    table = partition.table
    if partition.line.call("SCARD", partition.keys.sessions):
        return True
    others = [w for w in table.workers() if w != table.worker]
    return any(table.alive(others))


def _list(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))
