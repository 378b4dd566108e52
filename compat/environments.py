"""A virtual environment for each family, made once, kept under `.compat/`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ROOT / ".compat"
WANTED = (3, 12)
"""The Python of the environments where there is one; sparx needs it."""


@dataclass(frozen=True)
class Environment:
    """What pip installs besides slotstream, the families run in it, the Python they need."""

    name: str
    requirements: tuple[str, ...]
    families: tuple[str, ...]
    python: tuple[int, int] = (3, 11)


ENVIRONMENTS = (
    # Flax comes with slotstream's worker.
    Environment("flax", ("equinox",), ("linen", "nnx", "equinox")),
    Environment("sparx", ("sparxml",), ("sparx",), python=(3, 12)),
    Environment("spyx", ("spyx",), ("spyx",)),
    Environment("jaxpike", ("jaxpike",), ("jaxpike",)),
    Environment("mamba2", ("mamba2-jax",), ("mamba2",)),
    Environment("memax", ("memax[equinox]",), ("memax",)),
    Environment("recurrentgemma", ("recurrentgemma[jax]",), ("recurrentgemma",)),
    Environment("brainstate", ("brainstate",), ("brainstate",)),
)


class NotInstalled(RuntimeError):
    """An environment could not be made; says why in a line."""


def find_python(least: tuple[int, int]) -> str:
    """A Python of `WANTED`, else one of at least `least`, that really runs and has venv and pip.

    Looks on the PATH, and where pyenv keeps what it has built: its stand-ins on the PATH do not run
    where no version is chosen.

    Raises:
        NotInstalled: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    names = ("python3.12", "python3.13", "python3.11", "python3")
    found = [sys.executable, *filter(None, map(shutil.which, names))]
    found += [str(path) for path in sorted(pyenv.glob("3.*/bin/python3"))]
    versions = {path: _version(path) for path in dict.fromkeys(found)}
    usable = [path for path, version in versions.items() if version and version >= least]
    if not usable:
        needed = ".".join(map(str, least))
        raise NotInstalled(f"needs Python {needed} or later, and none was found")
    return min(usable, key=lambda path: versions[path] != WANTED)


def _version(path: str) -> tuple[int, int] | None:
    """A Python's version; None where it does not run or cannot make environments."""
    code = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    try:
        ran = subprocess.run(
            [path, "-c", code], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if ran.returncode:
        return None
    major, minor = ran.stdout.split()
    return int(major), int(minor)


def make(environment: Environment) -> Path:
    """The environment's Python, installed where it is missing or its requirements have changed.

    Raises:
        NotInstalled: with pip's reason.
    """
    folder = KEPT / environment.name
    python = folder / "bin" / "python"
    requirements = ["-e", f"{ROOT}[worker]", *environment.requirements]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"], *project["optional-dependencies"]["worker"]]
    text = " ".join([*requirements, *own])
    stamp, digest = folder / ".installed", hashlib.sha256(text.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return python
    base = find_python(environment.python)
    shutil.rmtree(folder, ignore_errors=True)
    _run([base, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *requirements])
    stamp.write_text(digest)
    return python


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        errors = [line for line in ran.stderr.splitlines() if line.startswith("ERROR:")]
        last = errors or ran.stderr.strip().splitlines()[-1:] or [f"exit status {ran.returncode}"]
        raise NotInstalled(" ".join(last)[:500])
