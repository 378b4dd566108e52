"""How a worker joins an app: the same row counts as the others, and the same bits.

The first worker writes what it found; every other takes those row counts, runs the same probe
and compares. Two machines can each agree within themselves and differ from one another, and a
replay on the other one would then not be exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from slotstream.endpoint import Endpoint
from slotstream.lines import Line
from slotstream.names import Keys, config_key
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.engine import Engine
from slotstream_worker.store import appconfig
from slotstream_worker.store.appconfig import AppConfig, Disagreement

log = logging.getLogger(__name__)


def partitions_of(line: Line, config: WorkerConfig) -> int:
    """How many partitions the app has, or is to have by this worker's option."""
    held = int(appconfig.read(line, config.app).get("partitions", "0"))
    return config.partition_count or held or 1


def agree(
    line: Line,
    endpoint: Endpoint,
    config: WorkerConfig,
    partitions: Sequence[Keys],
    engine: Engine,
    progress: Callable[[int], None],
) -> tuple[AppConfig, bool]:
    """Prepare the engine as the app's other workers have.

    Returns this worker's view of the configuration, and whether the bits agree.

    Raises:
        Disagreement: the app is configured for something else, and sessions or workers rely on
            that.
    """
    held = appconfig.read(line, config.app)
    shared = appconfig.row_counts(held)
    known = {*partitions, *(Keys(config.app, p) for p in range(int(held.get("partitions", "0"))))}
    wanted = config.row_counts or shared
    if shared and wanted != shared and in_use(endpoint, config, known):
        raise Disagreement(
            f"--row-counts {_list(wanted)} was asked for, and the workers of app {config.app} "
            f"launch with {_list(shared)}; leave the option out"
        )
    probed = engine.prepare(wanted or None, progress=progress)
    mine = _config(config, engine, wanted or probed.row_counts, len(partitions), probed.digest)
    now = appconfig.write(line, config.app, mine)
    differing = appconfig.differences(now, mine)
    if differing and not in_use(endpoint, config, known):
        # Nothing depends on the old configuration any more: this worker is the first again.
        log.info("app %s is configured anew: %s", config.app, "; ".join(differing))
        line.call("DEL", config_key(config.app))
        if not config.row_counts:
            probed = engine.prepare(progress=progress)
        mine = _config(config, engine, probed.row_counts, len(partitions), probed.digest)
        now = appconfig.write(line, config.app, mine)
        differing = appconfig.differences(now, mine)
    return mine, not differing or _excused(config, engine, now, differing)


def _config(
    config: WorkerConfig, engine: Engine, counts: tuple[int, ...], partitions: int, digest: str
) -> AppConfig:
    model = engine.model
    return AppConfig(
        frame=model.frame,
        sample_shape=model.sample_shape,
        dtype=model.dtype.name,
        inputs={i.name: (i.dtype.name, i.shape) for i in model.inputs},
        outputs={o.name: (o.dtype.name, o.shape) for o in model.outputs},
        row_counts=counts,
        probe=f"{model.weights}:{digest}",
        max_frame_bytes=config.max_frame_bytes,
        partitions=partitions,
    )


def _excused(
    config: WorkerConfig, engine: Engine, held: dict[str, str], differing: list[str]
) -> bool:
    """False where the difference is one of bits alone, and allowed; raises otherwise."""
    same_weights = held.get("probe", "").startswith(engine.model.weights + ":")
    if not (same_weights and all(line.startswith("probe:") for line in differing)):
        raise Disagreement(
            f"app {config.app} is configured otherwise, and sessions or workers rely on it:\n  "
            + "\n  ".join(differing)
            + "\nServe that model with those settings, choose another --app, or close the sessions "
            "and stop the workers first"
        )
    if not config.allow_inexact:
        raise Disagreement(
            f"this machine computes other bits than the first worker of app {config.app} "
            f"({differing[0]}), so a session that moves here would not go on exactly. Run workers "
            "of one app on the same kind of device, or say --allow-inexact"
        )
    log.warning(
        "this machine's bits differ from those of app %s (%s); a session that moves here is "
        "continued, but not bit for bit",
        *(config.app, differing[0]),
    )
    return False


def in_use(endpoint: Endpoint, config: WorkerConfig, partitions: Iterable[Keys]) -> bool:
    """Whether a session of the app is open or another of its workers alive."""
    for keys in partitions:
        line = Line(endpoint.pool(keys.control))
        try:
            if line.call("SCARD", keys.sessions):
                return True
            workers = [raw.decode() for raw in line.call("SMEMBERS", keys.workers)]
            if any(line.call("EXISTS", keys.lease(w)) for w in workers if w != config.worker):
                return True
        finally:
            line.close()
    return False


def _list(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))
