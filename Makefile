# make demo   train a small model on 4 ranks beside the one-device run
# make test   the fast tests
# Each sets up .venv first, with the versions of constraints.txt. Another Python: make PYTHON=python3.12 test

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2

## Tests start many processes: where bytecode isn't kept, each would compile every module anew
export PYTHONDONTWRITEBYTECODE :=

BIN   := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all float8 lint format clean

help:
	@sed -n 's/^# //p' Makefile
	@echo "also: make setup | test-all | float8 | lint | format | clean"

setup: $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS)

test-all: $(READY)
	$(BIN)/python -m pytest -n $(JOBS)

## Apart from the others, because transformers imports torchao wherever it is, and that prints on a CPU
float8: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[float8]'
	$(BIN)/python -m pytest tests/passes/test_float8.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info plan .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "autopar needs Python 3.11 or newer, but $(PYTHON) is" \
	        "$$($(PYTHON) --version 2>/dev/null || echo not there); name another: make PYTHON=python3.12 test" >&2; exit 1; }
	@echo "Setting up $(VENV) (some minutes the first time: PyTorch is large)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
