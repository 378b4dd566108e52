"""Trains the demo's network: ``python -m slotstream_worker.demo.train [--seed --epochs --out]``.

The epochs, learning rate, dropout, recurrence, noise, drift and loss per step were chosen among a
dozen variants by 5-fold cross-validation on the 270 training utterances (``--cross-validate``);
the other hyperparameters were set beforehand. None was chosen by the test accuracy, which is
computed at the end of a training and reported. A fold is a run of each speaker's consecutive
recordings, since the test split's come from other occasions than the training split's.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from rich.progress import Progress
from safetensors.numpy import save

from slotstream_worker.demo.network import WEIGHT_GRID, WEIGHT_LIMIT, SpeakerNet, averaged
from slotstream_worker.demo.vowels import (
    CHANNELS,
    LONGEST,
    SPEAKERS,
    Padded,
    folds,
    load,
    pad,
)

DEFAULT_OUT = Path(__file__).parent / "data" / "weights.safetensors"
FOLDS = 5


@dataclass(frozen=True)
class Settings:
    """The hyperparameters; noise and drift are in standard deviations of a channel."""

    epochs: int = 200
    batch: int = 45
    learning_rate: float = 1e-2
    weight_decay: float = 1e-2
    smoothing: float = 0.1  # of the labels
    average: float = 0.99  # decay per update of the moving average of the weights
    noise: float = 0.3  # white, drawn anew at each step
    drift: float = 0.2  # one offset per utterance and channel
    tilt: float = 0.1  # one gain per utterance and channel, relative to 1
    stretch: float = 0.25  # largest relative change of the duration
    per_step: float = 0.3  # share of the loss that is taken at each step


def augment(
    settings: Settings, key: jax.Array, x: jax.Array, lengths: jax.Array, deviation: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return a changed copy of x [batch, LONGEST, 12] and of its lengths [batch]."""
    keys = jax.random.split(key, 4)
    batch = x.shape[0]
    factor = jax.random.uniform(
        keys[0], (batch,), jnp.float32, 1.0 - settings.stretch, 1.0 + settings.stretch
    )
    longer = jnp.clip(jnp.round(lengths.astype(jnp.float32) * factor), 5.0, float(LONGEST))
    # Step i of the stretched utterance lies between two of the original's, at `position`.
    pace = (lengths - 1).astype(jnp.float32) / (longer - 1.0)
    position = jnp.minimum(
        jnp.arange(LONGEST, dtype=jnp.float32)[None, :] * pace[:, None],
        (lengths - 1).astype(jnp.float32)[:, None],
    )
    before = jnp.floor(position).astype(jnp.int32)
    after = jnp.minimum(before + 1, (lengths - 1)[:, None])
    share = (position - jnp.floor(position))[:, :, None]
    x = (1.0 - share) * jnp.take_along_axis(x, before[:, :, None], axis=1) + (
        share * jnp.take_along_axis(x, after[:, :, None], axis=1)
    )
    scale = deviation[None, None, :]
    x = x + settings.noise * scale * jax.random.normal(keys[1], x.shape, jnp.float32)
    x = x + settings.drift * scale * jax.random.normal(keys[2], (batch, 1, CHANNELS), jnp.float32)
    x = x * (1.0 + settings.tilt * jax.random.normal(keys[3], (batch, 1, CHANNELS), jnp.float32))
    return x, longer.astype(jnp.int32)


SHARPNESS = 8.0  # the scores are potentials of about 1: this makes them logits


def loss_of(
    settings: Settings, scores: jax.Array, lengths: jax.Array, labels: jax.Array
) -> jax.Array:
    """Return the smoothed cross-entropy of the averaged scores and of those of each step."""
    target = optax.smooth_labels(jax.nn.one_hot(labels, SPEAKERS), settings.smoothing)
    whole = optax.softmax_cross_entropy(SHARPNESS * averaged(scores, lengths), target)
    each = optax.softmax_cross_entropy(SHARPNESS * scores, target[None])
    each = averaged(each[:, :, None], lengths)[:, 0]
    return jnp.mean((1.0 - settings.per_step) * whole + settings.per_step * each)


def round_to_grid(params: Any) -> Any:
    """Round the matrices to the grid on which the network's products are exact."""

    def rounded(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if path[-1].key not in ("weights", "recurrent"):
            return leaf
        return jnp.clip(jnp.round(leaf / WEIGHT_GRID) * WEIGHT_GRID, -WEIGHT_LIMIT, WEIGHT_LIMIT)

    return jax.tree_util.tree_map_with_path(rounded, params)


def optimizer_of(settings: Settings, updates: int) -> optax.GradientTransformation:
    """Return AdamW, warmed up over five epochs of `updates`, then cooled along a cosine."""
    rate, total = settings.learning_rate, max(settings.epochs, 6) * updates
    schedule = optax.warmup_cosine_decay_schedule(rate / 10, rate, 5 * updates, total)
    # Matrices only: biases and time constants have one row.
    decayed = partial(jax.tree.map, lambda leaf: leaf.shape[0] > 1)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, weight_decay=settings.weight_decay, mask=decayed),
    )


@partial(jax.jit, static_argnames=("settings", "net"))
def run_epoch(
    carry: Any, key: jax.Array, data: Any, constants: Any, settings: Settings, net: SpeakerNet
) -> tuple[Any, jax.Array]:
    """Go through the training data (x, lengths, labels) once; return the mean loss as well.

    The carry: the parameters, their moving average and the optimizer's state.
    """
    x, lengths, labels = data
    updates = max(1, len(labels) // settings.batch)
    optimizer = optimizer_of(settings, updates)

    def update(carry: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        params, average, moments = carry
        rows, key = batch
        changing, dropping = jax.random.split(key)
        frames, ends = augment(settings, changing, x[rows], lengths[rows], 1.0 / constants["scale"])

        def loss(params: Any) -> jax.Array:
            outputs: Any = net.apply(
                {"params": params, "constants": constants},
                jnp.swapaxes(frames, 0, 1),
                train=True,
                rngs={"dropout": dropping},
            )
            return loss_of(settings, outputs["scores"], ends, labels[rows])

        value, slopes = jax.value_and_grad(loss)(params)
        changes, moments = optimizer.update(slopes, moments, params)
        params = optax.apply_updates(params, changes)
        average = optax.incremental_update(params, average, 1.0 - settings.average)
        return (params, average, moments), value

    shuffling, rest = jax.random.split(key)
    rows = jax.random.permutation(shuffling, len(labels))[: updates * settings.batch]
    batches = rows.reshape(updates, settings.batch), jax.random.split(rest, updates)
    carry, losses = jax.lax.scan(update, carry, batches)
    return carry, jnp.mean(losses)


def fit(
    settings: Settings,
    net: SpeakerNet,
    data: Padded,
    seed: int,
    report: Callable[[float], None] = lambda _: None,
) -> dict[str, Any]:
    """Train on the utterances and return the variables; call `report` with each epoch's loss."""
    steps = np.concatenate([x[:n] for x, n in zip(data.x, data.lengths, strict=True)])
    constants = {
        "mean": jnp.asarray(steps.mean(axis=0)),
        "scale": jnp.asarray(1.0 / steps.std(axis=0)),
    }
    key, start = jax.random.split(jax.random.key(seed, impl="rbg"))
    params = jax.jit(net.init)(start, jnp.zeros((1, 1, CHANNELS), jnp.float32))["params"]
    optimizer = optimizer_of(settings, max(1, len(data.labels) // settings.batch))
    carry = (params, params, jax.jit(optimizer.init)(params))
    arrays = (jnp.asarray(data.x), jnp.asarray(data.lengths), jnp.asarray(data.labels))
    for epoch in range(settings.epochs):
        carry, loss = run_epoch(
            carry, jax.random.fold_in(key, epoch), arrays, constants, settings, net
        )
        report(float(loss))
    return {"params": round_to_grid(carry[1]), "constants": constants}


def evaluate(net: SpeakerNet, variables: dict[str, Any], data: Padded) -> tuple[float, float]:
    """Return the share of utterances classified rightly, and the mean cross-entropy (nats)."""
    outputs: Any = jax.jit(lambda x: net.apply(variables, x))(jnp.swapaxes(data.x, 0, 1))
    means = averaged(outputs["scores"], jnp.asarray(data.lengths))
    losses = optax.softmax_cross_entropy_with_integer_labels(SHARPNESS * means, data.labels)
    return float(np.mean(np.argmax(means, axis=1) == data.labels)), float(jnp.mean(losses))


def cross_validate(settings: Settings, net: SpeakerNet, seed: int) -> None:
    """Print the accuracy over the folds of the training split, each left out once."""
    utterances = load("train")
    parts = folds(utterances, FOLDS)
    right = 0.0
    for left_out in range(FOLDS):
        kept = [u for u, f in zip(utterances, parts, strict=True) if f != left_out]
        rest = [u for u, f in zip(utterances, parts, strict=True) if f == left_out]
        accuracy, loss = evaluate(net, fit(settings, net, pad(kept), seed), pad(rest))
        print(f"fold {left_out}: accuracy {accuracy:.4f}, cross-entropy {loss:.3f} nats")
        right += accuracy * len(rest)
    print(f"cross-validated accuracy: {right / len(utterances):.2%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the test accuracy and write the weights; or cross-validate."""
    parser = argparse.ArgumentParser(description="Train the demo's spiking network.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="a .safetensors file")
    parser.add_argument("--cross-validate", action="store_true", help="without the test split")
    options = parser.parse_args(arguments)
    settings, net = Settings(epochs=options.epochs), SpeakerNet()
    if options.cross_validate:
        cross_validate(settings, net, options.seed)
        return
    start = time.monotonic()
    with Progress() as progress:
        task = progress.add_task("training", total=settings.epochs)

        def report(loss: float) -> None:
            progress.update(task, advance=1, description=f"loss {loss:.3f}")

        variables = fit(settings, net, pad(load("train")), options.seed, report)
    elapsed = time.monotonic() - start
    accuracy, _ = evaluate(net, variables, pad(load("test")))
    metadata = {"seed": str(options.seed), "epochs": str(options.epochs)}
    metadata |= {"test_accuracy": f"{accuracy:.6f}", "data_doi": "10.24432/C5NS47"}
    flat: Any = flatten_dict(jax.device_get(variables), sep="/")  # type: ignore[no-untyped-call]
    tensors = {name: np.ascontiguousarray(leaf) for name, leaf in flat.items()}
    options.out.write_bytes(save(tensors, metadata=metadata))
    print(f"trained in {elapsed:.0f} s; test accuracy {accuracy:.2%}; wrote {options.out}")


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):
        # XLA splits its loops by the cores it sees, and so rounds differently on each machine.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    main()
