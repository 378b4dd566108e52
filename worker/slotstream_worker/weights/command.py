"""`slotstream weights`: publish, status, rollback, delete."""

from __future__ import annotations

import json
from pathlib import Path

import click

from slotstream.options import app_option, redis_option


@click.group()
def weights() -> None:
    """Versions of an app's weights: publish, watch, roll back, delete."""


@weights.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--version", required=True, help="Its name, new for each.")
@redis_option
@app_option
@click.option(
    "--on-weights",
    type=click.Choice(["keep", "reset", "pin"]),
    default="keep",
    show_default=True,
    help="What becomes of a session's state: it is kept, goes back to rest, or the session "
    "finishes on the version it began with.",
)
@click.option("--at-once", is_flag=True, help="No worker applies it before all have verified it.")
@click.option(
    "--canary",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An .npz of recorded `frames` with expected outputs or a `bound`; a version that answers "
    "them badly is refused before it serves a session.",
)
@click.option("--cast", is_flag=True, help="A dtype may be changed with a loss.")
@click.option("--extra", is_flag=True, help="Pass tensors over that the model has no leaf for.")
@click.option(
    "--in-place", is_flag=True, help="The workers read the safetensors files at this very path."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write files there, on a path that the workers see, instead of chunks in Redis.",
)
@click.option("--rank", default=0, show_default=True, help="Which of the ranks this is.")
@click.option("--ranks", default=1, show_default=True, help="How many publish it together.")
@click.option(
    "--keep",
    default=4,
    show_default=True,
    help="Older versions beyond so many are deleted; 0: none.",
)
@click.option(
    "--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait for other ranks."
)
def publish(
    path: Path,
    version: str,
    url: str,
    app: str,
    on_weights: str,
    at_once: bool,
    canary: Path | None,
    cast: bool,
    extra: bool,
    in_place: bool,
    folder: Path | None,
    rank: int,
    ranks: int,
    keep: int,
    wait_s: float,
) -> None:
    """Publish the weights that PATH holds, as a version.

    PATH is a .safetensors file, a folder or index of sharded ones, an Orbax checkpoint, or Flax
    msgpack. The workers take it up by themselves; `slotstream weights status` shows how far they
    are.
    """
    from slotstream.client import Client
    from slotstream_worker.weights.publish import publish_file

    manifest = publish_file(
        Client(url, app),
        path,
        version=version,
        in_place=in_place,
        on_weights=on_weights,
        at_once=at_once,
        canary=canary.read_bytes() if canary else None,
        cast=cast,
        extra=extra,
        folder=folder,
        rank=rank,
        ranks=ranks,
        keep=keep,
        wait_s=wait_s,
    )
    if manifest is None:
        click.echo(f"rank {rank} of {ranks} has published its part of version {version}")
        return
    shards = sum(len(tensor.shards) for tensor in manifest.tensors)
    click.echo(
        f"version {version} is ready: {len(manifest.tensors)} tensors in {shards} shards, "
        f"{manifest.nbytes:,} bytes"
    )


@weights.command()
@redis_option
@app_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def status(url: str, app: str, as_json: bool) -> None:
    """Show the versions, and how far each worker is with them.

    For each worker: what it serves and holds, sessions by version, the state of its updates with
    bytes and seconds by phase, its transfer plans, and whom it serves.
    """
    from slotstream.client import Client
    from slotstream_worker.weights.catalogue import Catalogue
    from slotstream_worker.weights.status import read_status, show_status

    client = Client(url, app, patience_s=3.0)
    found = read_status(Catalogue(client.link, app))
    if as_json:
        click.echo(json.dumps(found))
    else:
        show_status(found, app)


@weights.command()
@click.argument("version", required=False)
@redis_option
@app_option
@click.option(
    "--to-start", is_flag=True, help="Back to what the workers were started with, not a version."
)
@click.option(
    "--on-weights", type=click.Choice(["keep", "reset", "pin"]), default="keep", show_default=True
)
def rollback(version: str | None, url: str, app: str, to_start: bool, on_weights: str) -> None:
    """Make VERSION the current one again; by default the one before the present."""
    from slotstream.client import Client
    from slotstream_worker.weights.catalogue import Catalogue
    from slotstream_worker.weights.errors import WeightsError

    if version and to_start:
        raise click.UsageError("either a version or --to-start")
    catalogue = Catalogue(Client(url, app, patience_s=3.0).link, app)
    before = catalogue.state().current
    target = "" if to_start else version or catalogue.before()
    if target == before:
        raise WeightsError(
            f"version {before or '(what the workers were started with)'} is the current one, and "
            "there is none before it to roll back to; name one"
        )
    catalogue.point(target, on_weights)
    names = [name or "what the workers were started with" for name in (before, target)]
    click.echo(f"from {names[0]} to {names[1]}; each session changes at its next checkpoint")


@weights.command()
@click.argument("version")
@redis_option
@app_option
@click.option(
    "--force",
    is_flag=True,
    help="Though a worker holds it or a session's row names it: such a session stops where it "
    "would have to be run again.",
)
def delete(version: str, url: str, app: str, force: bool) -> None:
    """Delete a version that nobody needs."""
    from slotstream.client import Client
    from slotstream_worker.weights.catalogue import Catalogue
    from slotstream_worker.weights.retention import delete as delete_version

    catalogue = Catalogue(Client(url, app, patience_s=3.0).link, app)
    delete_version(catalogue, version, force=force)
    click.echo(f"version {version} is gone")
