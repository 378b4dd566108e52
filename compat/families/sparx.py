"""sparx (`sparxml`): spiking networks whose layers keep their state in a collection."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sparx.models import SEWResNet, SpikingMLP
from sparx.nn import ALIF, LIF

from compat.case import Case, Cases
from slotstream_worker import models, sparx_runs

PACKAGE = "sparxml"


def events(rate: float, *sample: int) -> Any:
    """Event counts, Poisson at that rate a step."""
    return lambda rng, steps: rng.poisson(rate, (steps, *sample)).astype("float32")


def network(net: Any, sample: tuple[int, ...], **call: Any) -> Case:
    """A network, against one call over the whole stream."""
    zeros = jnp.zeros((5, 1, *sample))
    variables = net.init(jax.random.key(0), zeros, train=False, **call)
    variables = {name: tree for name, tree in variables.items() if name != "state"}

    def whole(stream: jax.Array) -> Any:
        return net.apply(variables, stream[:, None], train=False, **call)[:, 0]

    model = models.linen(net, variables, frame=5, sample_shape=sample, call=call)
    return Case(model, whole, "linen", events(0.5, *sample))


def train(folder: Path) -> Path:
    """Train a network with delays, deployed with rounded ones, for a few steps; returns the run."""
    from dew.data import Dataset, Loading
    from dew.inputs import Field
    from sparx.config import SNNRunConfig
    from sparx.encode import EventsEncoder
    from sparx.objectives import SpikingClassifierObjective

    rng = np.random.default_rng(0)
    records = {
        "spikes": rng.poisson(0.3, (32, 20, 12)).astype(np.uint8),
        "label": rng.integers(0, 3, 32).astype(np.int32),
    }
    loading = Loading(workers=0, threads=1, read_buffer=1)
    dataset = Dataset.from_records(records, batch=8, validation=records, loading=loading)
    run = SNNRunConfig()
    fields = {**run.model.fields, "hidden": [32], "classes": 3, "delays": 6}
    often = {"steps": 4, "log_every": 4, "eval_every": 4, "checkpoint_every": 4}
    trainer = dataclasses.replace(
        run.trainer, checkpoint_dir=str(folder), batch_size=8, compilation_cache_dir=None, **often
    )
    model = dataclasses.replace(run.model, fields=fields)
    run = dataclasses.replace(run, model=model, trainer=trainer)
    sample, encoder = Field("spikes", (20, 12)), EventsEncoder()
    objective = SpikingClassifierObjective(
        run.model.build(), sample, encoder, deployed={"sigma": 0.0}
    )
    run.train(objective, dataset, name="snn")
    return folder / "snn"


def trained() -> Case:
    """A run that sparx trains here, served by its directory, against its own trained task."""
    from sparx.tasks import SpikingClassification

    with tempfile.TemporaryDirectory(prefix="slotstream-sparx-") as folder:
        directory = train(Path(folder))
        served = sparx_runs.load(str(directory), frame=5)
        task = SpikingClassification.from_run(str(directory))

    def whole(stream: jax.Array) -> Any:
        return task.model.apply(task.variables, stream[:, None], train=False, **task.call)[:, 0]

    return Case(served, whole, "sparx:RUN", events(0.3, 12))


CASES: Cases = {
    "SpikingMLP": lambda: network(SpikingMLP((64, 32), 5), (40,)),
    "SpikingMLP, recurrent ALIF": lambda: network(
        SpikingMLP((32,), 5, neuron=ALIF(tau=5.0), recurrent=True), (40,)
    ),
    "SpikingMLP, delays, batch norm": lambda: network(
        SpikingMLP((32, 32), 5, delays=(8, 4, 0), batch_norm=True), (40,), sigma=0
    ),
    "SpikingMLP that lengthens its input": lambda: network(
        SpikingMLP((32,), 5, delays=8, extend=True), (40,), sigma=0
    ),
    "SEWResNet": lambda: network(
        SEWResNet((1, 1), 10, width=8, stem="small", neuron=LIF(tau=2.0)), (16, 16, 2)
    ),
    "a trained run": trained,
}
