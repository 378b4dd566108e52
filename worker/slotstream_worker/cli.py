"""Commands of the worker: `slotstream worker`, `check`, `demo`, `health`, `weights`."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from slotstream.options import app_option, redis_option
from slotstream_worker.config import WorkerConfig
from slotstream_worker.loading import TargetOptions
from slotstream_worker.settings import Counts, Ranges, option
from slotstream_worker.target_options import MODEL_HELP, target_options
from slotstream_worker.weights.command import weights

_DEFAULTS = WorkerConfig(nonce="0")


model_option = option(
    "--model",
    default="slotstream_worker.demo.serving:model",
    help=f"{MODEL_HELP} The demo's model by default.",
)
slots_option = option(
    "--slots", default=_DEFAULTS.slots, type=click.IntRange(1), help="Sessions held at a time."
)


@click.command()
@redis_option
@app_option
@model_option
@target_options
@slots_option
@option(
    "--name",
    default="",
    help="Identity that a restart keeps: its next process takes its "
    "sessions back at once. One worker a name.",
)
@option(
    "--max-sessions",
    default=0,
    type=click.IntRange(0),
    help="Sessions held at a time; those beyond the slots wait in host memory, the least recently "
    "used first. 0 for four times the slots.",
)
@option(
    "--idle-timeout",
    default=_DEFAULTS.idle_timeout_s,
    type=float,
    help="Seconds without frames after which a session is closed; 0 for never.",
)
@option(
    "--max-attempts",
    default=_DEFAULTS.max_attempts,
    type=int,
    help="Times a session may see its worker die before it is set aside.",
)
@option("--rebalance", is_flag=True, help="Hand sessions on to workers that hold fewer.")
@option(
    "--partitions",
    type=Ranges(),
    default=None,
    help="Serve these partitions only, as in 0-3,7; all of them by default.",
)
@option(
    "--partition-count",
    default=0,
    type=click.IntRange(0),
    help="Partitions of the app, chosen by its first worker (16 or more for a cluster; 1 unless "
    "it is said).",
)
@option(
    "--checkpoint-interval",
    default=_DEFAULTS.checkpoint_interval_s,
    type=float,
    help="Seconds between checkpoints of a session that moves.",
)
@option(
    "--checkpoint-bytes",
    default=_DEFAULTS.checkpoint_bytes_per_s,
    type=float,
    help="Bytes of state a second that checkpoints write at most.",
)
@option(
    "--lease",
    default=_DEFAULTS.lease_s,
    type=float,
    help="Seconds without a sign after which the worker counts as dead.",
)
@option(
    "--sweep",
    default=_DEFAULTS.sweep_s,
    type=float,
    help="Seconds between full comparisons with what Redis holds.",
)
@option(
    "--reply-retention",
    default=_DEFAULTS.reply_retention,
    type=int,
    help="Replies an open session keeps.",
)
@option(
    "--reply-ttl",
    default=_DEFAULTS.reply_ttl_s,
    type=float,
    help="Seconds that the replies of a closed session stay.",
)
@option(
    "--max-frame-bytes",
    default=_DEFAULTS.max_frame_bytes,
    type=int,
    help="The largest encoded frame taken.",
)
@option(
    "--read-ahead",
    default=_DEFAULTS.read_ahead,
    type=int,
    help="Entries of a session that are read at a time.",
)
@option(
    "--round-wait-ms",
    default=1e3 * _DEFAULTS.round_wait_s,
    type=float,
    help="How long a round waits for more sessions to have a frame; 0 for not at all.",
)
@option(
    "--round-rows",
    default=_DEFAULTS.round_rows,
    type=int,
    help="Sessions with which it waits no longer; 0 for what fills a launch.",
)
@option("--finite", is_flag=True, help="Refuse frames with NaN or infinities.")
@option(
    "--allow-inexact",
    is_flag=True,
    help="Serve though this device's bits differ from the app's other workers'.",
)
@option(
    "--allow-eviction",
    default="",
    metavar="POLICY",
    help="Serve though Redis has this maxmemory-policy, which may delete sessions.",
)
@option(
    "--row-counts",
    type=Counts(),
    default=None,
    help="Rows a launch, instead of those a measurement chooses.",
)
@option(
    "--compile-cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Folder that keeps compiled programs from one start to the next.",
)
@option(
    "--weights-listen",
    default="",
    metavar="HOST:PORT",
    help="Serve versions of the weights that this worker holds to other workers there (port 0: any "
    "free one), so that not each of them reads from Redis; by default not.",
)
@option(
    "--staging-bytes",
    default=0,
    type=click.IntRange(0),
    help="Host memory that a version on its way in may take; 0 for no limit.",
)
@option(
    "--resident-versions",
    default=_DEFAULTS.resident_versions,
    type=click.IntRange(2),
    help="Versions on the device at a time, where sessions are pinned to theirs.",
)
@option(
    "--canary",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="An .npz of recorded frames that every version must answer well before it is served.",
)
@option("--metrics-port", default=0, help="Serve Prometheus metrics on this port; 0 for none.")
@option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="What is logged.",
)
def worker(
    url: str,
    app: str,
    model: str,
    slots: int,
    name: str,
    max_sessions: int,
    idle_timeout: float,
    max_attempts: int,
    rebalance: bool,
    partitions: frozenset[int] | None,
    partition_count: int,
    checkpoint_interval: float,
    checkpoint_bytes: float,
    lease: float,
    sweep: float,
    reply_retention: int,
    reply_ttl: float,
    max_frame_bytes: int,
    read_ahead: int,
    round_wait_ms: float,
    round_rows: int,
    finite: bool,
    allow_inexact: bool,
    allow_eviction: str,
    row_counts: tuple[int, ...] | None,
    compile_cache: Path | None,
    weights_listen: str,
    staging_bytes: int,
    resident_versions: int,
    canary: Path | None,
    metrics_port: int,
    log_level: str,
    options: TargetOptions,
) -> None:
    """Serve a model: the process behind the device.

    SIGTERM drains: the round is finished, every session checkpointed and handed back, and the
    exit status is 0. A second SIGTERM aborts.
    """
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(message)s"
    )
    # The compiler's own messages are not the worker's.
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        config = WorkerConfig(
            redis=url,
            app=app,
            slots=slots,
            name=name,
            max_sessions=max_sessions,
            idle_timeout_s=idle_timeout,
            max_attempts=max_attempts,
            rebalance=rebalance,
            partitions=partitions or frozenset(),
            partition_count=partition_count,
            checkpoint_interval_s=checkpoint_interval,
            checkpoint_bytes_per_s=checkpoint_bytes,
            lease_s=lease,
            sweep_s=sweep,
            reply_retention=reply_retention,
            reply_ttl_s=reply_ttl,
            max_frame_bytes=max_frame_bytes,
            read_ahead=read_ahead,
            round_wait_s=1e-3 * round_wait_ms,
            round_rows=round_rows,
            finite=finite,
            allow_inexact=allow_inexact,
            allow_eviction=allow_eviction,
            row_counts=row_counts or (),
            compile_cache=compile_cache,
            weights_listen=weights_listen,
            staging_bytes=staging_bytes,
            resident_versions=resident_versions,
            canary=canary,
            metrics_port=metrics_port,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    run_worker(config, model, options)


def run_worker(config: WorkerConfig, target: str, options: TargetOptions | None = None) -> None:
    """Load the model and serve it until a signal; exits with status 1 and a reason otherwise."""
    from slotstream_worker.service import install_signals, serve

    stop = threading.Event()
    install_signals(stop)
    log = logging.getLogger("slotstream_worker")

    from slotstream_worker.device import set_up
    from slotstream_worker.engine.errors import CannotStream
    from slotstream_worker.loading import BadTarget, load
    from slotstream_worker.store.appconfig import Disagreement
    from slotstream_worker.weights.errors import BadWeights
    from slotstream_worker.worker import Displaced, NotHandedBack, Worker

    set_up(config.compile_cache)
    try:
        worker = Worker(config, load(target, options))
        log.info(
            "worker %s of app %s: %s, %d slots of %d bytes",
            config.worker,
            config.app,
            worker.model.name,
            config.slots,
            worker.model.spec.row_bytes,
        )
        serve(
            worker,
            stop,
            progress=lambda count: log.info("compiling and measuring launches of %d rows", count),
            ready=lambda: log.info(
                "serving, in launches of %s rows", ", ".join(map(str, worker.engine.row_counts))
            ),
        )
    except (BadTarget, BadWeights, CannotStream, Disagreement, Displaced, NotHandedBack) as error:
        log.error("%s", error)
        sys.exit(1)


@click.command()
@click.argument("model", default="slotstream_worker.demo.serving:model")
@target_options
@slots_option
@option("--row-counts", type=Counts(), default=None, help="Measure these row counts only.")
def check(
    model: str, slots: int, row_counts: tuple[int, ...] | None, options: TargetOptions
) -> None:
    """Say whether a model can be served, and how it would be.

    MODEL is MODULE:ATTRIBUTE, a callable without arguments that returns a StreamModel, or
    nir:FILE, a graph of the Neuromorphic Intermediate Representation, or sparx:RUN, the directory
    of a run that sparx trained. Prints its inputs, outputs and state, each row count with its
    milliseconds, and which of them agree bit for bit. The exit status is 0 for yes.
    """
    from slotstream_worker.checking import report
    from slotstream_worker.engine.errors import CannotStream
    from slotstream_worker.loading import BadTarget, load

    console = Console()
    try:
        report(load(model, options), slots, row_counts, console)
    except (BadTarget, CannotStream) as error:
        console.print(f"[red]no[/]: {escape(str(error))}", highlight=False)
        sys.exit(1)


@click.command()
@redis_option
@app_option
@option("--name", default="", help="Ask for this worker only.")
@click.option("--here", is_flag=True, help="Ask for workers on this host only.")
def health(url: str, app: str, name: str, here: bool) -> None:
    """Exit with 0 while a worker of the app is alive, that is, its loop makes progress."""
    from slotstream.client import Client
    from slotstream.operating import workers_of

    alive = [
        worker.id
        for worker in workers_of(Client(url, app, patience_s=2.0).app)
        if worker.alive
        and (not name or worker.id.rpartition(".")[0] == name)
        and (not here or worker.host == socket.gethostname())
    ]
    click.echo(f"{len(alive)} alive: {', '.join(alive)}" if alive else "no worker is alive")
    sys.exit(0 if alive else 1)


@click.command()
@click.argument("session")
@redis_option
@app_option
@click.option("--discard", is_flag=True, help="Delete what was kept of it, instead of a retry.")
def retry(session: str, url: str, app: str, discard: bool) -> None:
    """Put a session that was set aside back in the queue, from where it stood.

    SESSION is an id that `slotstream aside` shows. Its producer has read the `quarantined` reply;
    it attaches to the session again and reads its replies from the start.
    """
    from slotstream.client import Client
    from slotstream_worker.store.luascripts import script

    held = Client(url, app, patience_s=3.0).app
    keys = held.keys(session)
    names = [keys.control, *keys.shared(), *keys.of(session)]
    epoch = held.link.call("HGET", f"{keys.prefix}aside:{session}", "epoch") or b""
    answer = held.link.call(
        *("EVAL", script("retry").text, len(names), *names),
        *(keys.prefix, 0, 0, _DEFAULTS.max_attempts, session, epoch),
        "discard" if discard else "retry",
    ).decode()
    if answer != "ok":
        raise click.ClickException(f"session {session} {_NOT_RETRIED[answer]}")
    click.echo(f"session {session} " + ("is gone for good" if discard else "waits for a worker"))


_NOT_RETRIED = {
    "gone": "is not set aside",
    "open": "is open: its id is in use again; close that session first",
    "superseded": "has been opened anew since; what was kept can only be discarded (--discard)",
    "busy": "has new entries in its stream; delete that stream first",
}


@click.command()
@app_option
@click.option(
    "--against",
    metavar="URL",
    help="Stream to the workers of this Redis, instead of "
    "starting a Redis and a worker; kills nothing.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("demo.png"),
    show_default=True,
    help="Where the picture goes.",
)
@click.option(
    "--rate", "rate_hz", default=4.0, show_default=True, help="Frames a second of each session."
)
@click.option("--no-crash", is_flag=True, help="Do not kill the worker.")
@click.option("--server", help="The redis-server to run; one is found by default.")
def demo(
    app: str, against: str | None, png: Path, rate_hz: float, no_crash: bool, server: str | None
) -> None:
    """Stream 370 recordings through a worker that is killed on the way.

    Starts a real Redis and a worker, streams the 370 test utterances of the Japanese Vowels
    recordings as 370 concurrent sessions of a spiking network, kills the worker with SIGKILL in
    the middle and starts it again, and compares every reply with a direct call of the model.
    """
    from slotstream_worker.demo.run import run_against, run_demo

    if against:
        sys.exit(run_against(against, app, png, rate_hz=rate_hz))
    sys.exit(run_demo(png, rate_hz=rate_hz, crash=not no_crash, server=server))


COMMANDS: dict[str, click.Command] = {
    "worker": worker,
    "check": check,
    "demo": demo,
    "health": health,
    "retry": retry,
    "weights": weights,
}
