"""`--variables PATH`: checkpoints as people have them, into the model that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from flax import serialization
from safetensors.numpy import save_file

from slotstream_worker import StreamModel, models
from slotstream_worker.cli import check
from slotstream_worker.loading import BadTarget, TargetOptions, load
from slotstream_worker.weights.errors import BadWeights
from slotstream_worker.weights.names import flatten
from slotstream_worker.weights.variables import with_variables

FRAME = 4


class Reader(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.RNN(nn.GRUCell(5))(x)
        scale = self.variable("batch_stats", "scale", lambda: jnp.linspace(0.5, 1.5, 5))
        return nn.Dense(2)(h * scale.value.reshape(1, 1, 5))


MODULE = Reader()


def variables(seed: int) -> dict[str, Any]:
    found = MODULE.init(jax.random.key(seed), jnp.zeros((1, 3, 3)))
    found["batch_stats"] = {"scale": jnp.linspace(0.5, 1.5, 5) * (seed + 1)}
    return found


def reader(seed: int = 0) -> StreamModel:
    return models.linen(
        MODULE, variables(seed), frame=FRAME, sample_shape=(3,), batch_major=True, outputs="last"
    )


@pytest.fixture(scope="module")
def model() -> StreamModel:
    return reader()


TRAINED = variables(7)
FLAT = {name: np.asarray(leaf) for name, leaf in flatten(TRAINED).items()}


def as_safetensors(folder: Path) -> Path:
    save_file(FLAT, folder / "model.safetensors")
    return folder / "model.safetensors"


def as_sharded(folder: Path) -> Path:
    names = sorted(FLAT)
    for k in range(2):
        save_file({n: FLAT[n] for n in names[k::2]}, folder / f"part-{k}.safetensors")
    index = {n: f"part-{k % 2}.safetensors" for k, n in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {' + ", ".join(f'"{n}": "{f}"' for n, f in index.items()) + "}}"
    )
    return folder


def as_dotted_with_more(folder: Path) -> Path:
    more = {"opt_state.count": np.int64([3]), "step": np.int64([9])}
    save_file({n.replace("/", "."): a for n, a in FLAT.items()} | more, folder / "m.safetensors")
    return folder / "m.safetensors"


def as_msgpack(folder: Path) -> Path:
    (folder / "v.msgpack").write_bytes(serialization.msgpack_serialize(jax.device_get(TRAINED)))
    return folder / "v.msgpack"


def as_orbax(folder: Path) -> Path:
    with ocp.PyTreeCheckpointer() as writer:
        writer.save((folder / "ckpt").resolve(), TRAINED)
    return folder / "ckpt"


def as_half_precision(folder: Path) -> Path:
    """Of fewer bits: cast, which loses nothing."""
    save_file({n: a.astype(np.float16) for n, a in FLAT.items()}, folder / "h.safetensors")
    return folder / "h.safetensors"


WAYS = [as_safetensors, as_sharded, as_dotted_with_more, as_msgpack, as_orbax]


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_any_format_gives_the_bits_that_were_trained(way, tmp_path, model) -> None:
    loaded = with_variables(model, way(tmp_path))
    assert jax.tree.structure(loaded.variables) == jax.tree.structure(model.variables)
    for (path, got), expected in zip(
        jax.tree_util.tree_leaves_with_path(loaded.variables),
        jax.tree.leaves(TRAINED),
        strict=True,
    ):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes(), path
    assert loaded.weights == reader(7).weights != model.weights
    frames = jnp.asarray(model.random_frames(np.random.default_rng(1), (2,))).swapaxes(0, 1)
    served, _ = loaded.apply(loaded.variables, None, frames)
    whole = MODULE.apply(TRAINED, frames.swapaxes(0, 1)).swapaxes(0, 1)
    np.testing.assert_allclose(served, whole, rtol=1e-5, atol=1e-6)


def test_fewer_bits_are_cast_and_more_are_refused(tmp_path, model) -> None:
    loaded = with_variables(model, as_half_precision(tmp_path))
    kernel = loaded.variables["params"]["Dense_0"]["kernel"]
    expected = FLAT["params/Dense_0/kernel"].astype(np.float16).astype(np.float32)
    assert np.asarray(kernel).tobytes() == expected.tobytes()
    save_file({n: a.astype(np.float64) for n, a in FLAT.items()}, tmp_path / "d.safetensors")
    with pytest.raises(BadWeights, match=r"is float64\[.*expected float32\["):
        with_variables(model, tmp_path / "d.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.pop("params/Dense_0/bias"), r"lacks params/Dense_0/bias float32\[2\]"),
        (
            lambda f: f.update({"params/Dense_0/bias2": f.pop("params/Dense_0/bias")}),
            r"lacks params/Dense_0/bias float32\[2\]; it has params/Dense_0/bias2 instead",
        ),
        (
            lambda f: f.update({"params/Dense_0/kernel": np.ones((5, 3), np.float32)}),
            r"params/Dense_0/kernel is float32\[5, 3\], expected float32\[5, 2\]",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_what_was_expected(change, words, tmp_path, model) -> None:
    flat = dict(FLAT)
    change(flat)
    save_file(flat, tmp_path / "m.safetensors")
    with pytest.raises(BadWeights, match=words):
        with_variables(model, tmp_path / "m.safetensors")


def test_any_target_takes_them_and_says_why_not(tmp_path, monkeypatch) -> None:
    good, bad = as_safetensors(tmp_path), tmp_path / "none.safetensors"
    loaded = load("test_variables:reader", TargetOptions(variables=good))
    assert loaded.weights == reader(7).weights
    with pytest.raises(BadTarget, match=r"there is no .*none\.safetensors"):
        load("test_variables:reader", TargetOptions(variables=bad))
    (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:-9])
    cut = CliRunner().invoke(
        check,
        ["test_variables:reader", "--variables", str(tmp_path / "cut.safetensors")],
        env={"COLUMNS": "200"},
    )
    assert cut.exit_code == 1
    assert "is the file cut off?" in " ".join(cut.output.split())
