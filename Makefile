# make run   a text from the shipped model, with the check    make test   the whole test suite
# Needs python3 >= 3.11 with venv, and make. Everything lives in .venv; nothing else is touched.
SHELL := /bin/bash
.DELETE_ON_ERROR:
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

PY    := .venv/bin/python
# The name holds the folder's path: a copied or moved tree installs itself anew instead of running the old one's code.
STAMP := .venv/.installed-$(shell printf %s "$(CURDIR)" | cksum | cut -d' ' -f1)
JOBS  ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))

MODEL      ?= gdn
MAX_TOKENS ?= 200
RUN_ARGS   ?= --max-tokens $(MAX_TOKENS) --temperature 0.7 --top-p 0.9 --seed 3
TEST_ARGS  ?=

.PHONY: help setup run check test lint format types clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install (done by the others when needed)

$(STAMP): pyproject.toml constraints.txt scripts/bootstrap.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash scripts/bootstrap.sh
	@rm -f .venv/.installed-*
	@touch $@

run: $(STAMP) ## generate a text with replay decode and compare it with stock decode
	@$(PY) -m replayssm.cli generate $(MODEL) $(RUN_ARGS)

check: $(STAMP) ## decode steps of every linear layer against an fp64 oracle
	@$(PY) -m replayssm.cli check $(MODEL)

test: $(STAMP) ## all tests, TEST_ARGS="-k ring" for some
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) $(TEST_ARGS)

lint: $(STAMP) ## ruff: rules and format
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .

format: $(STAMP) ## ruff: rewrite
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

types: $(STAMP) ## mypy
	@$(PY) -m mypy

clean: ## remove .venv and caches
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
