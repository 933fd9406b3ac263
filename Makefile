# Two commands matter: `make quickstart` and `make test`. Both set up .venv first if it is missing or out of date.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.springtide-setup

.PHONY: setup quickstart test test-slow lint types format docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set up, then train the shipped model on three suites (about ten minutes on two cores)"
	@echo "make test         set up, then run the tests (under 10 minutes on two cores)"
	@echo "make setup | test-slow | lint | types | format | docs | bench | clean"

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/fetch_test_data.py
	$(PYTHON) -c 'import sys; sys.exit("Springtide needs Python 3.11 or newer, not " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) numpy
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[suites,train,dev]'
	$(BIN)/python scripts/fetch_test_data.py
	@touch $@

quickstart: setup
	$(BIN)/springtide quickstart $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-slow: setup
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

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
