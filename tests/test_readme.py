"""The README's code runs as it stands, and its commands and files exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import pytest

from slotstream.cli import cli
from slotstream_worker.loading import load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def mymodels(tmp_path, monkeypatch):
    """The README's first block, as the module it says it is."""
    (source,) = [block for block in BLOCKS if block.startswith("# mymodels.py")]
    (tmp_path / "mymodels.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("mymodels", None)


def block(text: str) -> str:
    (found,) = [block for block in BLOCKS if text in block]
    return found


def test_the_producer_talks_to_a_worker_of_the_model(mymodels, thread_worker, redis_url, capsys):
    thread_worker(load("mymodels:gru"))
    exec(block("slotstream.Client").replace("redis://localhost:6379/0", redis_url), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(line.endswith("(10, 16)") for line in lines)


def test_the_server_in_one_process(mymodels, capsys):
    exec(block("StreamServer"), {})
    assert capsys.readouterr().out == "(10, 16)\n"


def test_every_file_it_names_exists():
    named = re.findall(r"\]\(([^)#]+)\)", README)
    tables = re.findall(r"^\| `([a-z_/.]+)` +\|", README, re.MULTILINE)
    assert named
    assert tables
    for path in [*named, *tables]:
        assert (ROOT / path).exists(), path


def test_every_command_it_names_exists():
    context = click.Context(cli)
    for command in set(re.findall(r"slotstream ([a-z]+)", README)) & {"worker", "check", "push"}:
        assert cli.get_command(context, command)
    table = re.findall(r"^\| `slotstream ([a-z]+)` +\|", README, re.MULTILINE)
    assert sorted(table) == cli.list_commands(context)


def test_the_first_screen_has_the_two_commands():
    first = README.splitlines()[:20]
    assert any("make demo" in line for line in first)
    assert any("make test" in line for line in first)
