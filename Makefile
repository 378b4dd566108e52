# Every target does its own set-up: a fresh machine needs Python 3.11 (or later) and make.
#   make demo    a real Redis, a worker, 370 recorded streams, a crash in the middle
#   make test    the whole suite        make lint    ruff and mypy
#   make bench   the measurements (bench-peers, bench-gpu: see benchmarks/README.md)
#   make train   the demo's network, from its data
#   make chaos   faults by the hundred, every reply compared
#   make compat  packages' own models, served and compared (docs/compatibility.md)
# PYTHON=... chooses an interpreter; without it the first of these that really runs is taken
# (a version manager's stand-in for a Python that is not installed does not).
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: demo test lint format chaos compat bench bench-peers bench-gpu train clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "slotstream needs Python 3.11 or later with the venv module; none was found. Install one, or say PYTHON=/path/to/python3."; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/slotstream demo $(ARGS)

# What only computes runs two files at a time; what watches leases and latencies runs by itself.
test: $(STAMP)
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	@echo "first the tests that compute, two files at a time; then the others"
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m compute; first=$$?; \
	$(BIN)/python -m pytest -m "not compute" && exit $$first
endif

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Workers killed, paused, drained and added, Redis restarted, under load: about ten minutes.
chaos: $(STAMP)
	$(BIN)/python tests/chaos.py $(ARGS)

# Downloads packages, into environments of their own under .compat/, which stay.
compat: $(STAMP)
	$(BIN)/python -m compat $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

# What the benchmarks measure against, where it can be had: sparx, from Python 3.12 on.
bench-peers: $(STAMP)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "sparx needs Python 3.12; remove $(VENV) and say PYTHON=python3.12"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check sparxml

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

train: $(STAMP)
	$(BIN)/python -m slotstream_worker.demo.train $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
