"""The producer in JavaScript: its own tests, with Node's runner, on a real Redis."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PRODUCER = Path(__file__).resolve().parent.parent / "producer"
NODE_AT_LEAST = 18


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`; its output, errors included, as text."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def node_producer(tmp_path: Path) -> Path:
    """Copy the folder, with what its tests read beside it, and install its packages there."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not on the PATH")
    version = run(tmp_path, "node", "--version").stdout.strip()
    if int(re.sub(r"^v(\d+).*", r"\1", version)) < NODE_AT_LEAST:
        pytest.skip(f"node {NODE_AT_LEAST} or later is needed, here is {version}")
    folder = tmp_path / "producer" / "node"
    shutil.copytree(PRODUCER / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    (folder.parent / "slotstream").mkdir()
    for beside in ("vectors.json", "slotstream/cancel.lua"):
        shutil.copy(PRODUCER / beside, folder.parent / beside)
    try:
        installed = run(folder, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    except subprocess.TimeoutExpired:
        pytest.skip("npm ci took too long")
    if installed.returncode:
        pytest.skip(f"npm ci cannot run here: {installed.stdout.strip()[-300:]}")
    return folder


def test_the_node_producer_passes_its_own_tests(node_producer: Path, redis_url: str) -> None:
    tested = run(
        node_producer, "node", "--test", "--test-reporter=tap", SLOTSTREAM_TEST_REDIS=redis_url
    )
    assert tested.returncode == 0, tested.stdout
    counts = dict(re.findall(r"^# (\w+) (\d+)$", tested.stdout, re.MULTILINE))
    assert int(counts["pass"]) >= 10, tested.stdout
    assert counts["fail"] == counts["skipped"] == "0", tested.stdout


def test_the_lock_file_pins_every_package_and_names_no_host() -> None:
    text = (PRODUCER / "node" / "package-lock.json").read_text(encoding="utf-8")
    assert "://" not in text
    lock = json.loads(text)["packages"]
    wanted = json.loads((PRODUCER / "node" / "package.json").read_text(encoding="utf-8"))
    for name, version in wanted["dependencies"].items():
        assert lock[f"node_modules/{name}"]["version"] == version
    assert all("integrity" in package for path, package in lock.items() if path)
