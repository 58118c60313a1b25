# Two commands work on any machine with Python 3.11+ and make: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help run demo test check fmt fuzz mutants cluster cluster-down node node-down parts e2e chaos docker-build promtool chart bench bench-check lock clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpuwarden needs Python 3.11 or newer; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# The stamps record which lock file the environment was created from.
$(VENV)/run.stamp: requirements/run.lock pyproject.toml | $(BIN)/python
	@echo "Installing the requirements into $(VENV): once, in about half a minute"
	@$(PIP) install --require-hashes -r requirements/run.lock
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/dev.stamp: requirements/dev.lock $(VENV)/run.stamp
	@echo "Installing the requirements of the tests into $(VENV): once, in about a minute"
	@$(PIP) install --require-hashes -r requirements/dev.lock
	@touch $@

run: $(VENV)/run.stamp ## start the server on the embedded default, no cluster needed
	@$(BIN)/gpuwarden serve --hints

demo: $(VENV)/dev.stamp ## show the life of a pod in the terminal
	@$(BIN)/python -m scripts.demo

# Parallel processes. Tests wait more than they compute, so use more processes than cores.
TEST_PROCESSES ?= 4

# PYTEST_ARGS usually selects some tests, which say nothing about coverage. Without cached bytecode each process would
# compile all tests.
test: $(VENV)/dev.stamp ## run the tests (Python only), and check the branch coverage of three packages
	@rm -f .coverage.*
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest tests --ignore=tests/e2e -n $(TEST_PROCESSES) --dist worksteal \
	  $(or $(PYTEST_ARGS),-p tests.branch_coverage)
	$(if $(PYTEST_ARGS),,@$(BIN)/python -m scripts.branch_coverage)

check: $(VENV)/dev.stamp ## check format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(VENV)/dev.stamp ## format, and fix lint errors where possible
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

cluster: $(VENV)/run.stamp ## start a real control plane with simulated nodes (needs Go)
	@$(BIN)/python -m scripts.controlplane up $(CLUSTER_ARGS)

cluster-down: $(VENV)/run.stamp ## stop it
	@$(BIN)/python -m scripts.controlplane down

node: $(VENV)/dev.stamp ## start one with a real node: kubelet, containerd, NVIDIA's runtime (needs Go, root, gcc, apt)
	@$(BIN)/python -m scripts.node up $(NODE_ARGS)

node-down: $(VENV)/run.stamp ## stop it, like Ctrl-C
	@$(BIN)/python -m scripts.node down

PARTS := controlplane objectstore certmanager kubeconform buildkit

# Load on the machine disturbs timings: a test that timed out is run once more, at most three in all, and reported.
# Failed assertions are never retried: an attack that succeeds once has succeeded. Without retries: make e2e ONCE_MORE=
ONCE_MORE := --reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks \
	--only-rerun '^(NotInTime|Timeout|Start|Node)Error: ' \
	--only-rerun '^(TimeoutExpired|(Connect|Read|Write|Pool)Timeout): ' \
	--only-rerun '^ApiError: 50[04] .*(deadline exceeded|timed out)' \
	--rerun-except '^(AssertionError|InvariantViolatedError|Failed): '

parts: $(VENV)/dev.stamp ## build the programs for `make e2e`: once, in ten minutes (needs Go)
	@$(BIN)/python -m scripts.controlplane build $(PARTS)
	@$(BIN)/python -m scripts.postgres
	@$(BIN)/python -m scripts.node build

# Each process has its own control plane and runs whole files, because the tests of a file share their setup.
E2E_PROCESSES ?= 3

e2e: parts ## run the tests with a real control plane (needs Go)
	$(BIN)/python -m pytest tests/e2e -n $(E2E_PROCESSES) --dist loadfile $(ONCE_MORE) $(PYTEST_ARGS)

chaos: parts promtool ## run the long tests, for hours (needs Go)
	@$(BIN)/python -m scripts.controlplane build kueue
	$(BIN)/python -m pytest tests/project/test_alerts.py
	$(BIN)/python -m pytest tests/e2e -m long $(PYTEST_ARGS)

# For an hour: make fuzz FUZZ_SECONDS=3600. To repeat the inputs, pass the printed seed: FUZZ_ARGS="--seed N".
FUZZ_SECONDS ?= 60

fuzz: $(VENV)/dev.stamp ## send generated inputs to all routes of a real server and all parsers
	@$(BIN)/python -m scripts.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

mutants: $(VENV)/dev.stamp ## mutate a copy of the tree: the tests have to detect each mutation
	@$(BIN)/python -m scripts.mutants

promtool: $(VENV)/dev.stamp ## build promtool; `make test` then checks the alert rules with it (needs Go)
	@$(BIN)/python -m scripts.promtool

bench: $(VENV)/dev.stamp ## measure; results go to bench/results/
	$(BIN)/python -m bench.run

bench-check: $(VENV)/dev.stamp ## measure briefly, and fail beyond limits
	$(BIN)/python -m bench.run --check

# The base image by digest: the given one, or the current one.
BASE_IMAGE ?= python:3.12-slim

docker-build: ## build the image: make docker-build IMG=name:tag (needs Docker with buildx)
	@test -n "$(IMG)" || { echo "set the image: make docker-build IMG=name:tag" >&2; exit 1; }
	@case "$(BASE_IMAGE)" in *@sha256:*) base="$(BASE_IMAGE)" ;; \
	  *) base="$(BASE_IMAGE)@$$(docker buildx imagetools inspect $(BASE_IMAGE) --format '{{.Manifest.Digest}}')" \
	    || exit 1 ;; esac; set -x; \
	docker build --build-arg PYTHON_IMAGE="$$base" --tag "$(IMG)" .

chart: $(VENV)/dev.stamp ## generate parts of chart/, deploy/ and docs/reference from the code
	$(BIN)/python -m scripts.chart

lock: $(VENV)/dev.stamp ## update the lock files, with hashes
	scripts/lock.sh $(BIN)/uv

clean: ## remove what make created
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
