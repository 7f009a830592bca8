# Everything runs in .venv, which the first target that needs it builds from the pinned constraints.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: demo test lint types bench clean

demo: .venv/.ready        ## a writer and two readers on real input, every message checked
	$(BIN)/aioshm demo $(ARGS)

test: .venv/.ready        ## the whole test suite
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/.ready        ## ruff (lint and format) and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/.ready       ## mypy --strict
	$(BIN)/mypy

bench: .venv/.ready       ## every benchmark against its rivals, one after the other
	$(BIN)/python -m benchmarks.throughput $(ARGS)
	$(BIN)/python -m benchmarks.latency $(ARGS)
	$(BIN)/python -m benchmarks.fanout $(ARGS)
	$(BIN)/python -m benchmarks.idle $(ARGS)
	$(BIN)/python -m benchmarks.fairness $(ARGS)
	$(BIN)/python -m benchmarks.events_publish
	$(BIN)/python -m benchmarks.events_replay

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "aioshm needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:                    ## remove the environment and every cache
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
