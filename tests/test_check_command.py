"""`slotstream check`: says whether a model can be served and how, or why not."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import serving_models
from slotstream_worker import checking
from slotstream_worker.cli import check
from slotstream_worker.engine import capacity
from slotstream_worker.engine.comparison import compare
from slotstream_worker.engine.engine import Engine
from slotstream_worker.loading import BadTarget, load

HEAD = """
import jax.numpy as jnp
import flax.linen as nn
import numpy as np
from slotstream_worker import models
"""


MODEL = functools.cache(serving_models.served)


@pytest.fixture(autouse=True)
def _built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_models, "served", MODEL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a module into the working directory, forgotten with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])

    def write(name: str, text: str) -> None:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        for part in (name, name.partition(".")[0]):
            monkeypatch.setitem(sys.modules, part, None)  # so that it is taken out again
            monkeypatch.delitem(sys.modules, part)

    return write


def run_check(*arguments: str) -> Result:
    return CliRunner().invoke(check, arguments, env={"COLUMNS": "200"})


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def refusal(*arguments: str) -> str:
    """What the command says where it says no, on however many lines."""
    result = run_check(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    text = words(result.output)
    assert text.startswith("no: ")
    assert " yes" not in text
    return text


def test_a_model_that_streams_is_described_with_what_its_launches_take() -> None:
    result = run_check("serving_models:served", "--slots", "16", "--row-counts", "1,4")
    assert result.exit_code == 0, result.output
    text, model = words(result.output), MODEL()
    assert "RecurrentMLP" in text
    assert "float32 [4, 6]" in text
    for output in model.outputs:
        assert f"output {output.name} │ {output.dtype.name} {list(output.shape)}" in text
    for leaf in model.spec.leaves:
        assert f"state {leaf.path} │ {leaf.dtype.name} {list(leaf.shape)}, batch axis 0" in text
    assert f"state a slot │ {model.spec.row_bytes:,} bytes" in text
    assert f"slots a GiB │ {2**30 // model.spec.row_bytes:,}" in text
    assert model.weights in text
    for count, other in ((1, 4), (4, 1)):
        # rows, ms, µs a row, what it agrees with, whether it is used
        row = re.search(rf"│ {count} │ (\d+\.\d+) │ (\d+\.\d) │ ([^│]+) │ (yes|) ?│", text)
        assert row, text
        assert float(row[1]) > 0
        assert float(row[2]) == pytest.approx(1e3 * float(row[1]) / count, abs=0.6)
        assert row[3].strip() in {str(other), "none other"}
    assert not re.search(r"│ 16 │ \d", text), "only the row counts asked for are measured"
    assert re.search(
        r"yes: it can be served, in launches of (1, 4|1|4) rows\. A round of all 16 "
        r"sessions takes about \d+\.\d\d ms\.",
        text,
    )


def test_row_counts_that_agree_are_used_and_said_to() -> None:
    result = run_check("serving_models:served", "--slots", "3", "--row-counts", "4")
    assert result.exit_code == 0
    text = words(result.output)
    assert re.search(r"│ 4 │ \S+ │ \S+ │ none other │ yes │", text)
    assert "yes: it can be served, in launches of 4 rows. A round of all 3 sessions" in text


# Models that cannot stream


def test_a_model_that_cannot_stream_is_refused_with_the_reason(
    module: Callable[[str, str], None],
) -> None:
    module(
        "lookahead",
        HEAD
        + """
def step(variables, carry, frames):
    return carry, frames - jnp.broadcast_to(frames.mean(0, keepdims=True), frames.shape)

def model():
    return models.carry(step, lambda batch: jnp.zeros((batch, 1)), {}, frame=3, sample_shape=(2,))
""",
    )
    text = refusal("lookahead:model", "--slots", "4", "--row-counts", "4")
    assert "step cannot be served: it mixes time steps" in text


def test_a_model_whose_sessions_mix_is_refused_after_measuring(
    module: Callable[[str, str], None],
) -> None:
    module(
        "mixing",
        HEAD
        + """
def step(variables, carry, frames):
    return carry, frames - jnp.broadcast_to(frames.mean(1, keepdims=True), frames.shape)

def model():
    return models.carry(step, lambda batch: jnp.zeros((batch, 1)), {}, frame=3, sample_shape=(2,))
""",
    )
    result = run_check("mixing:model", "--slots", "4", "--row-counts", "4")
    assert result.exit_code == 1
    text = words(result.output)
    assert "no: step cannot be served: a session's outputs depend on the other sessions" in text
    assert "yes: it can be served" not in text


@pytest.mark.parametrize(
    "message",
    ["shape [frame, batch] expected", "[/tmp/weights] is missing", "see [bold] in the guide"],
)
def test_a_reason_with_brackets_is_printed_as_it_is(
    module: Callable[[str, str], None], message: str
) -> None:
    name = "brackets" + str(abs(hash(message)))
    module(
        name,
        HEAD
        + f"""
def step(variables, carry, frames):
    raise LookupError({message!r})

def model():
    return models.carry(step, lambda batch: jnp.zeros((batch, 1)), {{}}, frame=3, sample_shape=(2,))
""",
    )
    text = refusal(f"{name}:model")
    assert "one frame [3, 2, 2] ([frame, batch, *sample_shape]) from rest" in text
    assert f"LookupError: {message}" in text


# Targets


@pytest.mark.parametrize("target", ["serving_models", "", ":", ":served", "serving_models:"])
def test_a_target_is_a_module_a_colon_and_an_attribute(target: str) -> None:
    text = refusal(target)
    assert "a model is MODULE:ATTRIBUTE, as in mymodels:gru" in text
    assert repr(target) in text


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("no_such_module_here:model", "no_such_module_here"),
        ("serving_models.deeper:model", "serving_models.deeper"),
        ("no_such_module_here.deeper:model", "no_such_module_here"),
    ],
)
def test_a_module_that_is_not_there_is_named(target: str, missing: str) -> None:
    text = refusal(target)
    assert f"there is no module '{missing}'" in text
    assert "PYTHONPATH" in text
    with pytest.raises(BadTarget, match=missing):
        load(target)


@pytest.mark.parametrize("target", [".relative:model", "..relative:model", ".:model"])
def test_a_relative_module_is_a_bad_target(target: str) -> None:
    with pytest.raises(BadTarget):
        load(target)


def test_a_module_that_fails_inside_raises_its_own_error(
    module: Callable[[str, str], None],
) -> None:
    module("failing", "raise LookupError('the weights have moved')")
    with pytest.raises(LookupError, match="the weights have moved"):
        load("failing:model")
    result = run_check("failing:model")
    assert result.exit_code == 1
    assert isinstance(result.exception, LookupError)


def test_a_module_that_lacks_one_of_its_own_imports_is_not_called_missing(
    module: Callable[[str, str], None],
) -> None:
    module("needy", "import a_package_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there") as error:
        load("needy:model")
    assert not isinstance(error.value, BadTarget)
    module("folder.__init__", "")
    module("folder.inner", "import folder.another")
    with pytest.raises(ModuleNotFoundError, match=r"folder\.another"):
        load("folder.inner:model")


def test_a_module_that_lacks_the_attribute_is_said_to_with_what_it_has(
    module: Callable[[str, str], None],
) -> None:
    module("having", "GRU = 1\ndef lstm(): pass\n_hidden = 2\n")
    text = refusal("having:gru")
    assert "module 'having' has no 'gru'; it has GRU, lstm" in text
    assert "_hidden" not in text
    assert "has no 'lstm.deeper'" in refusal("having:lstm.deeper")


@pytest.mark.parametrize(
    ("target", "kind"),
    [("number", "int"), ("nothing", "NoneType"), ("Thing", "Thing"), ("text", "str")],
)
def test_an_attribute_that_gives_something_else_is_said_to(
    module: Callable[[str, str], None], target: str, kind: str
) -> None:
    module("others", "number = 3\ntext = 'model'\ndef nothing(): pass\nclass Thing: pass\n")
    text = refusal(f"others:{target}")
    assert f"others:{target} gives a {kind}, and a StreamModel is needed" in text
    assert "slotstream_worker.models.linen and .carry make one" in text


def test_a_callable_that_needs_arguments_is_a_bad_target(
    module: Callable[[str, str], None],
) -> None:
    module("wanting", "def model(size): return size\n")
    with pytest.raises(BadTarget, match="size"):
        load("wanting:model")


def test_a_model_is_found_in_the_working_directory_called_or_as_it_is(
    module: Callable[[str, str], None],
) -> None:
    module(
        "here",
        HEAD
        + """
class Zoo:
    one = models.carry(lambda variables, carry, frames: (carry + 1, frames),
                       lambda batch: jnp.zeros((batch,)), {}, frame=3, sample_shape=(2,),
                       name="one")

def two():
    return Zoo.one
""",
    )
    assert load("here:Zoo.one").name == "one"
    assert load("here:two") is load("here:Zoo.one")


@pytest.mark.parametrize("counts", ["four", "1,,4", "1;4", "1.5"])
def test_row_counts_are_whole_numbers(counts: str) -> None:
    result = run_check("serving_models:served", "--row-counts", counts)
    assert result.exit_code == 2
    assert "row counts are whole numbers with commas between" in words(result.output)


@pytest.mark.parametrize("counts", ["0", "-4,4"])
def test_row_counts_are_at_least_one(counts: str) -> None:
    result = run_check("serving_models:served", "--slots", "4", "--row-counts", counts)
    assert result.exit_code == 2, "a usage error, before anything is compiled"


def test_several_inputs_are_listed_by_name(module) -> None:
    module(
        "twofold",
        HEAD
        + """
def model():
    def step(w, carry, x):
        told = x["audio"] * x["talk"].astype(jnp.float32)[..., None]
        sums = carry[None] + jnp.cumsum(told, axis=0)
        return sums[-1], sums

    return models.carry(
        step, lambda batch: jnp.zeros((batch, 3)), {}, frame=2,
        sample_shape={"talk": (), "audio": (3,)}, dtype={"talk": "bool", "audio": "float32"},
        outputs="last",
    )
""",
    )
    result = run_check("twofold:model", "--slots", "4", "--row-counts", "4")
    text = words(result.output)
    assert "input audio │ float32 [2, 3]" in text, text
    assert "input talk │ bool [2]" in text
    assert "output output │ float32 [3]" in text
    assert "uint8" not in text  # how they travel is nobody's concern


# What is compared


@pytest.fixture(scope="module")
def prepared() -> Engine:
    engine = Engine(MODEL(), slots=16)
    engine.prepare((1, 4))
    return engine


def test_what_is_served_is_compared_with_itself_alone_and_with_whole_calls(prepared) -> None:
    seen: list[tuple[int, int]] = []
    company, whole = compare(prepared, progress=lambda n, of: seen.append((n, of)))
    assert company.bitwise
    assert company.largest == 0
    assert company.scale > 0.5  # spikes among them
    assert whole.largest <= 1e-5 * whole.scale or whole.unequal < 0.02
    assert seen == [(n, seen[0][1]) for n in range(1, seen[0][1] + 1)]
    assert len(prepared.pool) == 0


def test_a_difference_in_company_is_seen_measured_and_makes_the_answer_no(
    prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = prepared.launcher.launch

    def off_by_one_in_company(pool, plan, frames, *more):
        launched = launch(pool, plan, frames, *more)
        if len(plan.slot_indices) > 1:
            launched.outputs = {n: a.at[0].add(1) for n, a in launched.outputs.items()}
        return launched

    monkeypatch.setattr(prepared.launcher, "launch", off_by_one_in_company)
    company, whole = compare(prepared)
    assert not company.bitwise
    assert company.largest == pytest.approx(1, abs=1e-6)
    assert 0.0 < company.unequal < 1.0
    assert not whole.bitwise
    monkeypatch.setattr(checking, "compare", lambda *_a, **_k: (company, whole))
    text = words(refused_late("serving_models:served", "--slots", "16", "--row-counts", "1,4"))
    assert "other bits than alone (largest difference 1" in text


def refused_late(*arguments: str) -> str:
    result = run_check(*arguments)
    assert result.exit_code == 1, result.output
    assert "no: " in result.output
    return result.output


def test_the_room_on_the_device_is_what_its_memory_holds(prepared) -> None:
    model = MODEL()
    result = run_check("serving_models:served", "--slots", "16", "--row-counts", "1,4")
    found = re.search(r"state of about ([\d,]+) sessions", words(result.output))
    assert found, result.output
    held = int(found[1].replace(",", ""))
    memory = capacity.memory_bytes()
    assert 0.5 * memory < held * model.spec.row_bytes < 1.2 * memory
    few = capacity.sessions(prepared, 100_000)
    assert 0 < few * model.spec.row_bytes < 90_000
    assert capacity.sessions(prepared, 1_000) == 0
