# Every target that needs packages makes its own environment in $(VENV), and remakes it when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
NEWEST ?= python3.12
MINUTES ?= 10
WORKERS ?= 2
FIT ?= all --quick

BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
PARITY := $(VENV)/.parity
AOT := $(VENV)/.aot
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

.PHONY: help demo setup test test-slow test-bits test-all test-newest aot aot-tests fit fit-table lint format types clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(CORE) ## Train an elastic model beside a plain one and show the loss at each loop count (MINUTES=10)
	$(BIN)/python -m experiments.demo --minutes $(MINUTES)

setup: $(DEV) ## Make the environment for working on the project

test: $(DEV) ## Run the default tests
	$(PYTEST)

test-slow: $(PARITY) ## Run the tests marked slow or parity, the latter against PyTorch
	$(PYTEST) -m 'slow or parity' --timeout 1800

test-bits: $(DEV) ## Run the laws that hold bit for bit on programs compiled as a user's are, which takes longer
	XLA_FLAGS= JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(PYTEST) -m 'not aot and not parity' -k bit_for_bit

test-all: test test-slow test-bits ## Run all tests

aot: ## Compile every kernel and a training step for TPUs and H200 (none is needed), in an environment of its own
	$(MAKE) aot-tests VENV=.venv-aot

# One process: libtpu's lock file lets one load it at a time.
aot-tests: $(AOT)
	$(BIN)/python -m pytest -m aot --timeout 1800

fit: ## Compile full-size models for slices of TPUs and H200s (none is needed) and tell what fits, as docs/scale.md (FIT=dory_4b: one, with a run's effort)
	$(MAKE) fit-table VENV=.venv-aot

fit-table: $(AOT)
	$(BIN)/python -m elr_jax.fit $(FIT)

test-newest: ## Run the default tests in a second environment with the Python NEWEST (python3.12)
	$(MAKE) test PYTHON=$(NEWEST) VENV=.venv-newest

lint: $(DEV) ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(DEV) ## Mend what can be mended of style and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(DEV) ## Check types
	$(BIN)/pyright --pythonpath $(BIN)/python

clean: ## Remove environments and caches; results of runs stay
	rm -rf .venv .venv-newest .venv-aot .cache .hypothesis .pytest_cache .ruff_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about a minute"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(PARITY): $(DEV)
	$(BIN)/python -m pip install --quiet --editable '.[parity]'
	touch $@

# The CUDA plugin alone, at jax's own version: its runtime libraries are of no use without a GPU.
$(AOT): $(DEV)
	$(BIN)/python -m pip install --quiet --editable '.[aot]'
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	  $(BIN)/python -m pip install --quiet --no-deps jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	touch $@

$(DEV): $(CORE)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
