# Targets of this project; `make` alone lists them. Needs make and Python 3.11, nothing else.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
SECONDS ?= 600
SEED ?= 1
TRANSPORT ?= nixl
ENGINE ?= docker
IMAGE ?= baton:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help venv dev serve test lint format equality faults chaos soak bench-batching bench-handoff \
	bench-engine bench-peers bench-roofline bench-observability bench-step bench-tools bench-loadtest \
	proof scaling-run scaling-plots dashboards observability chart image requirements clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

venv: $(VENV)/.installed  ## create .venv and install what serving needs

dev: $(VENV)/.installed-dev  ## the same, and what tests and linters need

serve: venv  ## serve the default model: make serve ARGS="--port 8123 --decode 2"
	@exec $(BIN)/baton serve $(ARGS)

test: dev  ## run the tests: make test ARGS="-k config"
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(ARGS)

lint: dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: dev  ## let ruff format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

equality: dev  ## all of the matrix of which `make test` runs a part: answers against one engine's
	$(BIN)/python -m pytest --full -s tests/serve/test_equality.py $(ARGS)

faults: dev  ## cancel at each point, kill at each stage: the full counts
	$(BIN)/python -m pytest --full -s tests/faults $(ARGS)

chaos: dev  ## kills, stops, drains, lost messages under load: make chaos SEED=1 SECONDS=600 TRANSPORT=tcp
	$(BIN)/python -m tests.chaos.run --seed $(SEED) --seconds $(SECONDS) --transport $(TRANSPORT) $(ARGS)

soak: dev  ## steady load for SECONDS, watching the memory of every process
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(ARGS)

bench-batching: dev  ## decode rate of 16 streams over HTTP against the engine's own
	$(BIN)/python -m tests.bench_batching $(ARGS)

bench-handoff: dev  ## what tickets, seals and leases add to the bare NIXL read
	$(BIN)/python -m tests.bench_handoff $(ARGS)

bench-engine: dev  ## the engine against the machine's ceilings and transformers: docs/performance.md
	$(BIN)/python -m tests.bench_engine $(ARGS)

bench-peers: dev  ## the same with llama.cpp (built from source, once) and any server by --url NAME=URL
	$(BIN)/python -m tests.bench_peers $(ARGS)

bench-roofline: dev  ## a worker's roofline gauges against bench-engine's figures, within 15 %
	$(BIN)/python -m tests.bench_roofline $(ARGS)

bench-observability: dev  ## what metrics and an open console cost of throughput: below 2 %
	$(BIN)/python -m tests.bench_observability $(ARGS)

bench-step: dev  ## what a step costs outside the model, by part
	$(BIN)/python -m tests.bench_step $(ARGS)

bench-tools: dev  ## our load test and `vllm bench serve` at the same servers, by turns
	$(BIN)/python -m tests.bench_tools $(ARGS)

bench-loadtest: dev  ## the load test's figures against a server of known delays, on a quiet machine
	$(BIN)/python -m tests.bench_loadtest $(ARGS)

proof: dev  ## disaggregated against mixed workers on this machine: under 40 minutes, docs/performance.md
	$(BIN)/python -m loadtest.proof $(ARGS)

scaling-run: dev  ## pools that scale by themselves, as the load shifts from prompts to answers and back: 10 minutes
	$(BIN)/python -m tests.scaling_run $(ARGS)

observability: dev  ## every query of boards and rules against baton serve under Prometheus (a Debian package)
	$(BIN)/python -m pytest --full -s tests/serve/test_prometheus.py tests/integration/test_promtool.py $(ARGS)

scaling-plots: dev  ## the planner in virtual time against an oracle: pictures and table of docs/scaling.md
	$(BIN)/python -m services.planner.plots $(ARGS)

dashboards: dev  ## write the Grafana boards and docs/dashboards.md from services/dashboards
	$(BIN)/python -m services.dashboards

chart: dev  ## write the chart's schema of values, its README and its copies of rules and boards
	$(BIN)/python -m services.chart

image:  ## build the image: make image IMAGE=NAME:TAG ENGINE=podman ARGS="--build-arg VARIANT=cuda"
	$(ENGINE) build -f deploy/Dockerfile -t $(IMAGE) $(ARGS) .

requirements: dev  ## write deploy/requirements.txt, the image's packages, from those in .venv
	$(BIN)/python -m tests.support.image_requirements

clean:  ## remove .venv and everything that tools have left
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say which pyproject.toml was installed; pip runs again when it is newer.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
