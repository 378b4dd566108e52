"""The compatibility runner is an instrument: it tells what matches from what differs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compat import environments, report
from compat.case import Case
from compat.environments import Environment, NotInstalled, find_python
from compat.runner import run

from slotstream_worker import StreamModel, models
from slotstream_worker.engine.pool import Pool

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _compile_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and forks are not used here."""
    monkeypatch.setattr(Pool, "warm", lambda _: None)


def decay(weights: Any, carry: Any, frames: Any) -> Any:
    """A leaky sum of powers of two, which no order of adding rounds."""

    def step(carry: Any, x: Any) -> Any:
        carry = weights * carry + x
        return carry, carry

    return jax.lax.scan(step, carry, frames)


def toy(step: Any = decay) -> StreamModel:
    return models.carry(
        step, jnp.zeros((1, 3)), jnp.float32(0.5), frame=4, sample_shape=(3,), name="toy"
    )


def whole(stream: Any) -> Any:
    return decay(jnp.float32(0.5), jnp.zeros((1, 3)), stream[:, None])[1][:, 0]


def integers(rng: Any, steps: int) -> Any:
    return rng.integers(0, 4, (steps, 3))


def test_what_matches_is_found_to_be_bitwise_in_any_company() -> None:
    found = run("toy", lambda: Case(toy(), whole, "carry", integers))
    assert (found.verdict, found.difference, found.company) == ("bitwise", 0.0, True)
    assert (found.adapter, found.state, found.state_bytes) == ("carry", "float32", 12)
    assert found.rows == (4,)
    assert found.sessions == 6
    assert found.frames == 20
    assert found.scale > 1


@pytest.mark.parametrize(("off", "verdict"), [(1e-6, "rounding"), (1e-2, "differs")])
def test_what_differs_at_one_element_of_the_last_frame_is_found(off: float, verdict: str) -> None:
    def elsewhere(stream: Any) -> Any:
        outputs = whole(stream)
        return outputs.at[18, 1].add(jnp.float32(off) * jnp.max(outputs))

    found = run("toy", lambda: Case(toy(), elsewhere, "carry", integers))
    assert found.verdict == verdict
    assert found.difference >= 0.1 * off * found.scale


def test_state_that_leaks_from_one_session_to_the_next_is_found() -> None:
    """A session that does not start from what the package starts from."""
    model = dataclasses.replace(toy())
    leaky = dataclasses.replace(
        model,
        apply=lambda w, state, x: model.apply(
            w, jnp.ones((x.shape[1], 3)) if state is None else state, x
        ),
    )
    assert run("toy", lambda: Case(leaky, whole, "carry", integers)).verdict == "differs"


def test_a_row_that_rounds_by_its_place_is_served_in_launches_that_hold() -> None:
    """As a convolution does on a CPU, whose threads share a launch of four rows unevenly."""

    def placed(weights: Any, carry: Any, frames: Any) -> Any:
        carry, ys = decay(weights, carry, frames)
        place = jnp.arange(frames.shape[1], dtype=jnp.float32)[None, :, None]
        return carry, ys + (jnp.float32(1e-3) * place if frames.shape[1] == 4 else 0 * place)

    found = run("toy", lambda: Case(toy(placed), whole, "carry", integers))
    assert (found.verdict, found.company) == ("bitwise", True)
    assert found.rows
    assert 4 not in found.rows


def test_what_cannot_stream_says_why() -> None:
    def backwards(weights: Any, carry: Any, frames: Any) -> Any:
        carry, ys = decay(weights, carry, frames[::-1])
        return carry, ys[::-1]

    found = run("toy", lambda: Case(toy(backwards), whole, "carry"))
    assert found.verdict == "refused"
    assert "mixes time steps" in found.reason


def test_an_error_of_the_package_is_a_line_and_no_crash() -> None:
    def broken() -> Case:
        raise AttributeError("module 'jax' has no attribute 'gone'")

    found = run("toy", broken)
    assert found.verdict == "failed"
    assert found.reason == "AttributeError: module 'jax' has no attribute 'gone'"
    silent = run("toy", lambda: Case(toy(), whole, "carry", lambda _, steps: [[0.0] * 3] * steps))
    assert (silent.verdict, silent.reason) == (
        "failed",
        "ValueError: every output of toy is zero, so nothing was compared",
    )
    shaped = run("toy", lambda: Case(toy(), lambda stream: whole(stream)[:, :2], "carry"))
    assert shaped.verdict == "failed"
    assert "float32[16, 3], its package float32[16, 2]" in shaped.reason


def test_the_table_says_each_verdict_and_is_put_between_its_marks(tmp_path: Path) -> None:
    results = [
        {"case": "a", "verdict": "bitwise", "company": True, "scale": 1.0, "difference": 0.0},
        {"case": "b", "verdict": "rounding", "company": False, "scale": 2.0, "difference": 1e-7},
        {"case": "c", "verdict": "refused", "reason": "it looks | ahead\n" + "x" * 400},
    ]
    families = [{"package": "toys", "versions": {"toys": "1.2"}, "results": results}]
    rows = report.rows(families)
    assert rows[0] == ("toys 1.2", "a", "", "", "yes, its bits", "0 of 1")
    assert rows[1][4:] == ("yes, to rounding", "1e-07 of 2; ITS BITS DEPEND ON COMPANY")
    assert rows[2][4] == "refused"
    narrow = report._seen({**results[0], "rows": [2]})
    assert narrow == ("yes, its bits", "0 of 1; in launches of 2 rows")
    assert len(rows[2][5]) == 220
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        report.write(page, families)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("| toys 1.2 | a |") == 1
    assert "looks \\| ahead x" in text
    page.write_text("nothing here")
    with pytest.raises(ValueError, match="has no line"):
        report.write(page, families)


def test_a_family_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The last line of its output is the result; what the package prints is none of it."""
    (tmp_path / "compat").mkdir()
    for path in (ROOT / "compat").glob("*.py"):
        (tmp_path / "compat" / path.name).write_text(path.read_text())
    (tmp_path / "compat" / "families").mkdir()
    (tmp_path / "compat" / "families" / "toys.py").write_text(
        "print('hello from a package')\n"
        "PACKAGE = 'numpy'\n"
        "def one():\n    raise RuntimeError('no')\n"
        "CASES = {'one': one}\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-m", "compat.one", "toys"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["versions"].keys() == {"numpy", "jax"}
    assert [(r["case"], r["verdict"], r["reason"]) for r in found["results"]] == [
        ("one", "failed", "RuntimeError: no")
    ]


def test_what_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compat.__main__ import run as run_family

    monkeypatch.setattr(environments, "KEPT", tmp_path)
    monkeypatch.setattr("compat.__main__.KEPT", tmp_path)
    future = Environment("future", ("somepackage[extra]",), ("toys",), python=(9, 0))
    found = run_family(future, "toys")
    assert found["package"] == "somepackage"
    (result,) = found["results"]
    assert result["verdict"] == "missing"
    assert result["reason"] == (
        "could not be installed: needs Python 9.0 or later, and none was found"
    )
    with pytest.raises(NotInstalled, match="boom: no such thing"):
        environments._run(
            [sys.executable, "-c", "import sys; sys.exit('x\\nERROR: boom: no such thing')"]
        )


def test_a_python_that_runs_is_found() -> None:
    assert environments._version(find_python((3, 11)))
    assert environments._version("/bin/false") is None
