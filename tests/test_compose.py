"""compose.yaml and the Dockerfile say only what the code knows: no Docker engine is needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from slotstream.cli import cli

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
GPU = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())
DOCKERFILE = (ROOT / "worker" / "Dockerfile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SERVICES = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]


def parse(arguments: list[str]) -> click.Context:
    """Parse a `slotstream` command line as the program would, without running it."""
    context = click.Context(cli)
    command = cli.get_command(context, arguments[0])
    assert command is not None, f"there is no command {arguments[0]}"
    return command.make_context(arguments[0], list(arguments[1:]), parent=context)


def environment_variables(command: str) -> set[str]:
    found = cli.get_command(click.Context(cli), command)
    return {option.envvar for option in found.params if option.envvar}


def plain(value: str) -> str:
    """A value with its `${NAME:-default}` replaced by the default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


@pytest.mark.parametrize("name", OURS)
def test_every_command_parses_with_its_environment(name, monkeypatch):
    service = SERVICES[name]
    for variable, value in service.get("environment", {}).items():
        monkeypatch.setenv(variable, plain(value))
    context = parse(service["command"])
    for variable, value in service.get("environment", {}).items():
        option = next(o for o in context.command.params if o.envvar == variable)
        assert str(context.params[option.name]) == plain(value), f"{variable} was not taken"


@pytest.mark.parametrize("name", OURS)
def test_every_environment_variable_is_an_option_of_the_command(name):
    service = SERVICES[name]
    known = environment_variables(service["command"][0])
    assert set(service.get("environment", {})) <= known


def test_variables_that_a_user_may_set_are_named_as_the_options_are():
    known = environment_variables("worker")
    text = (ROOT / "compose.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) <= known


def test_health_checks_are_commands_that_exist():
    test = SERVICES["worker"]["healthcheck"]["test"]
    assert test[:2] == ["CMD", "slotstream"]
    assert parse(test[2:]).params["here"] is True
    assert SERVICES["redis"]["healthcheck"]["test"] == ["CMD", "redis-cli", "ping"]


def test_redis_keeps_what_it_acknowledged_and_listens_to_this_host_only():
    redis = SERVICES["redis"]
    assert redis["command"][0] == "redis-server"
    options = dict(zip(redis["command"][1::2], redis["command"][2::2], strict=True))
    assert options == {
        "--appendonly": "yes",
        "--maxmemory-policy": "noeviction",
        "--hash-max-listpack-value": "4096",
    }
    assert all(port.startswith("127.0.0.1:") for port in redis["ports"])
    (published,) = redis["ports"]
    assert published.endswith(":6379")
    # Whoever connects says the same host and port.
    for url in (
        SERVICES["worker"]["environment"]["SLOTSTREAM_REDIS"],
        SERVICES["producer"]["command"][2],
    ):
        assert url == "redis://redis:6379/0"


def test_the_metrics_port_is_the_one_exposed():
    worker = SERVICES["worker"]
    assert worker["expose"] == [worker["environment"]["SLOTSTREAM_METRICS_PORT"]]


def test_volumes_are_declared_and_lead_where_the_settings_say():
    mounted = {}
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source, target = volume.split(":")
            mounted[target] = source
    assert set(mounted.values()) == set(COMPOSE["volumes"])
    assert SERVICES["worker"]["environment"]["SLOTSTREAM_COMPILE_CACHE"] in mounted
    assert "/cache" in mounted
    assert "install -d -o slotstream /cache" in DOCKERFILE, "a non-root worker must own its cache"


def test_services_depend_on_services_that_have_a_health_check():
    for service in SERVICES.values():
        for name, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[name]


def test_the_worker_can_be_scaled():
    worker = SERVICES["worker"]
    assert "container_name" not in worker
    assert "ports" not in worker, "two workers cannot publish one port"
    assert "SLOTSTREAM_NAME" not in worker["environment"], "a name is one worker's own"


@pytest.mark.parametrize(
    "extra",
    [
        s["build"]["args"]["EXTRA"]
        for s in [*(SERVICES[n] for n in OURS), GPU["services"]["worker"]]
    ],
)
def test_build_arguments_are_extras_of_the_distribution(extra):
    assert extra in EXTRAS
    assert re.search(r"^ARG EXTRA=", DOCKERFILE, re.MULTILINE)
    assert '".[${EXTRA}]"' in DOCKERFILE


@pytest.mark.parametrize("name", OURS)
def test_the_dockerfile_is_where_compose_looks_for_it(name):
    build = SERVICES[name]["build"]
    assert build["context"] == "."
    assert (ROOT / build["dockerfile"]).read_text() == DOCKERFILE


def test_the_dockerfile_copies_what_exists_and_runs_as_nobody_special():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), f"COPY {source}"
            assert source.split("/")[0] not in ignored
    users = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    assert users == ["slotstream"]
    assert "useradd" in DOCKERFILE
    assert 'ENTRYPOINT ["slotstream"]' in DOCKERFILE
    cmd = re.search(r'^CMD \["(\w+)"\]', DOCKERFILE, re.MULTILINE)
    assert parse([cmd.group(1)])


def test_the_gpu_override_changes_services_that_exist():
    assert set(GPU["services"]) <= set(SERVICES)
    devices = GPU["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]
