"""The app's configuration: what the first worker found, and every other must agree with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from slotstream.lines import Line
from slotstream.names import config_key
from slotstream_worker.store.luascripts import script

PROTOCOL = 1


class Disagreement(RuntimeError):
    """This worker cannot serve the app as it is configured; says what differs and what to do."""


@dataclass(frozen=True)
class AppConfig:
    """Fields of `<app>:config`. `inputs`: those of a model with several, dtype and sample shape."""

    frame: int
    sample_shape: tuple[int, ...]
    dtype: str
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]
    row_counts: tuple[int, ...]
    probe: str
    max_frame_bytes: int
    inputs: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    partitions: int = 1
    protocol: int = PROTOCOL

    def fields(self) -> dict[str, str]:
        """The hash's fields."""
        fields = {
            "protocol": str(self.protocol),
            "partitions": str(self.partitions),
            "frame": str(self.frame),
            "sample_shape": json.dumps(list(self.sample_shape)),
            "dtype": self.dtype,
            "outputs": _shapes(self.outputs),
            "row_counts": json.dumps(list(self.row_counts)),
            "probe": self.probe,
            "max_frame_bytes": str(self.max_frame_bytes),
        }
        if self.inputs:  # a frame is then a map of them, and has no dtype and shape of its own
            del fields["sample_shape"], fields["dtype"]
            fields["inputs"] = _shapes(self.inputs)
        return fields


def read(line: Line, app: str) -> dict[str, str]:
    """The app's configuration as it stands; empty where no worker has written one."""
    return _pairs(line.call("HGETALL", config_key(app)))


def write(line: Line, app: str, config: AppConfig) -> dict[str, str]:
    """Write the configuration where there is none; returns the one that holds."""
    args = [part for pair in config.fields().items() for part in pair]
    return _pairs(line.script(script("config"), [config_key(app)], args))


def row_counts(held: Mapping[str, str]) -> tuple[int, ...]:
    """The row counts that every worker of the app uses; none where there is no configuration."""
    return tuple(json.loads(held["row_counts"])) if "row_counts" in held else ()


def differences(held: Mapping[str, str], config: AppConfig) -> list[str]:
    """Fields in which this worker disagrees, each as a line for a person."""
    return [
        f"{name}: the app has {held.get(name, 'none')}, this worker {value}"
        for name, value in config.fields().items()
        if held.get(name) != value
    ]


def _shapes(arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Arrays by name as JSON."""
    described = {
        name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in arrays.items()
    }
    return json.dumps(described, sort_keys=True)


def _pairs(flat: list[bytes]) -> dict[str, str]:
    items = iter(flat)
    return {name.decode(): value.decode() for name, value in zip(items, items, strict=True)}
