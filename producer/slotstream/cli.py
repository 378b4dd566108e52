"""The command line. Commands that need the worker's packages are loaded only when called."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

import slotstream
from slotstream.client import Client
from slotstream.errors import SlotstreamError
from slotstream.options import app_option, redis_option

_WORKER_COMMANDS = {
    "worker": "Serve a model: the process behind the device.",
    "check": "Say whether a model can be served, and how it would be.",
    "demo": "Stream 370 recordings through a worker that is killed on the way.",
    "health": "Exit with 0 while a worker of the app is alive.",
    "retry": "Put a session that was set aside back in the queue.",
    "weights": "Versions of an app's weights: publish, watch, roll back, delete.",
}


class _Group(click.Group):
    """A group whose worker commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_WORKER_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _WORKER_COMMANDS:
            return super().get_command(ctx, cmd_name)
        try:
            module = importlib.import_module("slotstream_worker.cli")
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"`slotstream {cmd_name}` needs {error.name}, which is not installed; "
                "pip install 'slotstream[worker]'"
            ) from error
        command: click.Command = module.COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table, not from the commands: `--help` must not need JAX.
        rows = []
        for name in self.list_commands(ctx):
            known = _WORKER_COMMANDS.get(name)
            own = None if known else super().get_command(ctx, name)
            rows.append((name, known or (own.get_short_help_str(90) if own else "")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(slotstream.__version__)
def cli() -> None:
    """Serve streaming models that carry state to many sessions at once, over Redis Streams."""


@cli.command()
@redis_option
@app_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line instead of a table.")
@click.option("--limit", default=200, show_default=True, help="Sessions shown at most.")
def sessions(url: str, app: str, as_json: bool, limit: int) -> None:
    """Show the slot table: who owns each session, and how far it is."""
    from slotstream.slottable import read_table, show_table

    client = Client(url, app, patience_s=3.0)
    rows = read_table(client.app)
    if as_json:
        for row in rows[:limit]:
            click.echo(json.dumps(row))
        return
    show_table(rows, app, limit)


@cli.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--session", "session_id", help="The session's id; a random one by default.")
@redis_option
@app_option
@click.option(
    "--frame",
    type=int,
    help="Time steps a frame, for an array of single steps; by default the app's own.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Save the outputs here (.npy, or .npz for several) instead of printing them.",
)
@click.option(
    "--rate", "rate_hz", type=float, help="Frames a second; as fast as possible otherwise."
)
@click.option(
    "--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds to wait for a reply."
)
def push(
    file: Path,
    session_id: str | None,
    url: str,
    app: str,
    frame: int | None,
    out: Path | None,
    rate_hz: float | None,
    timeout_s: float,
) -> None:
    """Stream the rows of an array as frames, and print or save the replies.

    FILE is a .npy of frames [n, frame, *sample_shape], or of time steps [steps, *sample_shape],
    which are cut into frames of the app's length.
    """
    from slotstream.pushing import push_file

    push_file(
        Client(url, app),
        file,
        session_id,
        frame=frame,
        out=out,
        rate_hz=rate_hz,
        timeout_s=timeout_s,
    )


@cli.command()
@redis_option
@app_option
@click.option("--sessions", default=16, show_default=True, help="Sessions opened.")
@click.option(
    "--rate",
    "rate_hz",
    default=0.0,
    help="Frames a second of each session; as fast as the windows allow otherwise.",
)
@click.option(
    "--duration", "duration_s", default=10.0, show_default=True, help="Seconds of pushing."
)
@click.option(
    "--frames",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A .npy of frames [n, frame, *sample_shape], or of time steps [steps, *sample_shape], "
    "pushed round and round; random ones otherwise.",
)
@click.option("--window", default=64, show_default=True, help="Frames of a session in flight.")
@click.option("--seed", default=0, show_default=True, help="Of the random frames.")
@click.option(
    "--wait",
    "wait_s",
    default=30.0,
    show_default=True,
    help="Seconds without any reply after which those still missing count as lost.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures here.",
)
def bench(
    url: str,
    app: str,
    sessions: int,
    rate_hz: float,
    duration_s: float,
    file: Path | None,
    window: int,
    seed: int,
    wait_s: float,
    json_file: Path | None,
) -> None:
    """Put a load on a deployment, and show its throughput, latencies, and what went missing.

    Opens sessions of its own beside those that are there, and ends them. With a rate, latencies
    count from when a frame was due, also where it had to wait to be pushed. Exits with 0 when
    every frame had its reply, once.
    """
    from slotstream.bench.command import bench as run_bench
    from slotstream.bench.plan import Plan

    try:
        plan = Plan(sessions, rate_hz, duration_s, window, seed, wait_s)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not run_bench(url, app, plan, file=file, json_file=json_file):
        sys.exit(1)


@cli.command()
@redis_option
@app_option
def workers(url: str, app: str) -> None:
    """Show the app's workers: which are alive, where, and how many sessions each holds."""
    from slotstream.operating import show_workers, workers_of

    show_workers(workers_of(Client(url, app, patience_s=3.0).app), app)


@cli.command()
@click.argument("worker")
@redis_option
@app_option
@click.option(
    "--timeout",
    "timeout_s",
    default=60.0,
    show_default=True,
    help="Seconds to wait until it has left.",
)
def drain(worker: str, url: str, app: str, timeout_s: float) -> None:
    """Ask a worker to hand all its sessions back and leave.

    WORKER is a worker as `slotstream workers` shows it, or its name without the nonce.
    """
    from slotstream.operating import drain_worker

    click.echo(drain_worker(Client(url, app, patience_s=3.0).app, worker, timeout_s))


@cli.command()
@redis_option
@app_option
def rebalance(url: str, app: str) -> None:
    """Even the sessions out over the workers that are alive, once."""
    from slotstream.operating import rebalance_workers

    for line in rebalance_workers(Client(url, app, patience_s=3.0).app):
        click.echo(line)


@cli.command()
@redis_option
@app_option
def aside(url: str, app: str) -> None:
    """Show the sessions that were set aside, since their workers died of them."""
    from slotstream.operating import sessions_aside, show_aside

    show_aside(sessions_aside(Client(url, app, patience_s=3.0).app), app)


def main(argv: list[str] | None = None) -> Any:
    """Entry point of the command `slotstream`."""
    import redis

    np.set_printoptions(precision=4, suppress=True, threshold=64, edgeitems=3, linewidth=100)
    try:
        return cli.main(args=argv, prog_name="slotstream")
    except (SlotstreamError, redis.RedisError) as error:
        click.echo(f"slotstream: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
