# Everything runs in .venv, which the first target that needs it builds from the pinned constraints.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: demo test lint types bench bench-rivals clean

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
	$(BIN)/python -m benchmarks.writer_cost $(ARGS)
	$(BIN)/python -m benchmarks.memory $(ARGS)
	$(BIN)/python -m benchmarks.events_publish
	$(BIN)/python -m benchmarks.events_replay

bench-rivals: .venv-rivals/.ready   ## aioshm against its rivals, in an environment of their own; fetches a wheel of 340 MB
	.venv-rivals/bin/python -m benchmarks.compare $(ARGS)

.venv/.ready: pyproject.toml constraints.txt aioshm/ring/_native.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "aioshm needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

RIVALS := benchmarks/compare/constraints-rivals.txt

.venv-rivals/.ready: pyproject.toml constraints.txt aioshm/ring/_native.c $(RIVALS) benchmarks/compare/install_vllm.py
	$(PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/python -m pip install --disable-pip-version-check -c constraints.txt -c $(RIVALS) \
		-e '.[cli,torch,uvloop]' faster-fifo iceoryx2 matplotlib pynng
	.venv-rivals/bin/python benchmarks/compare/install_vllm.py
	touch $@

clean:                    ## remove the environment and every cache
	rm -rf .venv .venv-rivals results build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
