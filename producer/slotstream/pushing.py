"""`slotstream push`: one array file as one session."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import click
import numpy as np

from slotstream.client import Client
from slotstream.errors import BadFrame
from slotstream.replies import Reply


def push_file(
    client: Client,
    file: Path,
    session_id: str | None,
    *,
    frame: int | None,
    out: Path | None,
    rate_hz: float | None,
    timeout_s: float,
) -> None:
    """Stream a .npy file's frames through a session; print the replies, or save their outputs."""
    frames = cut(np.load(file, allow_pickle=False), client.config(), frame)
    name = session_id or secrets.token_hex(8)
    outputs: list[Any] = []

    def show(_: str, reply: Reply) -> None:
        if reply.error:
            click.echo(f"{reply.id}  error  {reply.error}", err=True)
        elif reply.output is not None:
            outputs.append(reply.output)
            if out is None:
                click.echo(f"{reply.id}  {_text(reply.output)}")

    client.run({name: frames}, timeout_s=timeout_s, rate_hz=rate_hz, on_reply=show)
    if out is not None and outputs:
        click.echo(f"{len(outputs)} outputs of session {name} in {_save(out, outputs)}")


def _save(out: Path, outputs: list[Any]) -> Path:
    """Save the outputs of all frames, joined: .npy, or .npz where there are several."""
    if isinstance(outputs[0], dict):
        joined: Any = {key: np.concatenate([o[key] for o in outputs]) for key in outputs[0]}
        out = out.with_suffix(".npz")
        np.savez(out, **joined)
    else:
        out = out.with_suffix(".npy")
        np.save(out, np.concatenate(outputs))
    return out


def cut(array: Any, config: dict[str, str], frame: int | None) -> Any:
    """Frames `[n, frame, *sample_shape]` of an array of frames, or of time steps."""
    if not config and frame is None:
        raise BadFrame("shape", "the app's frame is not known yet (no worker has run): say --frame")
    length = frame or int(config["frame"])
    rank = len(json.loads(config["sample_shape"])) if config else array.ndim - 1
    if array.ndim == rank + 2:
        return array
    if array.ndim != rank + 1 or len(array) % length:
        raise BadFrame(
            "shape",
            f"expected frames [n, {length}, ...] or a multiple of {length} "
            f"time steps, got an array {list(array.shape)}",
        )
    return array.reshape(len(array) // length, length, *array.shape[1:])


def _text(output: Any) -> str:
    if isinstance(output, dict):
        return "  ".join(f"{name} {_text(value)}" for name, value in output.items())
    return str(np.asarray(output)).replace("\n", " ")
