# Each target sets up its own environment when it is missing or pyproject.toml has changed, and is safe to repeat.
#   make test TORCH=2.14.1      tests against another PyTorch, in an environment of its own
#   make test ARGS="-k engine"  arguments for pytest (or for the demo)
#   make test PYTHON=python3.12 another Python
PYTHON ?= python3
DEFAULT_TORCH := 2.13.0
TORCH ?= $(DEFAULT_TORCH)
ARGS ?=

VENV := $(if $(filter $(DEFAULT_TORCH),$(TORCH)),.venv,.venv-torch$(TORCH))
BIN := $(VENV)/bin
PYTAG := $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])' 2>/dev/null)
READY := $(VENV)/.ready-$(PYTAG)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check docs bench clean

help:
	@echo "make demo | test | check | docs | bench | setup | clean"
	@echo "variables: TORCH=$(TORCH) PYTHON=$(PYTHON) ARGS=\"$(ARGS)\""

setup: $(READY)

# The mark is taken away before anything is installed and put back last, so an interrupted set-up is never taken for a
# finished one: without the mark, the environment is made anew. torch comes first and alone, so that pip takes the build
# that its configuration prefers, and nothing later pulls in another.
$(READY): pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "Python is required: '$(PYTHON)' was not found; install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is required: '$(PYTHON)' is $(PYTAG); name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { echo "'$(PYTHON)' cannot make virtual environments: install its venv package (Debian and Ubuntu: apt install python3-venv), or name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV) with torch $(TORCH); the first time takes a few minutes"
	@test -e "$@" || "$(PYTHON)" -m venv --clear "$(VENV)"
	@rm -f "$(VENV)"/.ready-*
	"$(BIN)/python" -m pip install -qq "torch==$(TORCH)"
	"$(BIN)/python" -m pip install -qq --editable ".[dev,docs]"
	@touch "$@"

# Threads that wait asleep: where other programs want the cores too, threads that spin make a step take many times as long.
# The log level hides a line of the CPU allocator about memory that it gave out before it was observed.
demo: $(READY)
	@OMP_WAIT_POLICY=passive TORCH_CPP_LOG_LEVEL=ERROR "$(BIN)/lowtide" demo $(ARGS)

test: $(READY)
	"$(BIN)/python" -m pytest $(ARGS)

check: $(READY)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/python" -m pytest -q tests/test_layout.py
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --quiet --strict

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict

bench: $(READY)
	@set -e; for file in benchmarks/[!_]*.py; do echo "== $$file"; "$(BIN)/python" "$$file" $(ARGS); done

clean:
	rm -rf .venv .venv-torch* site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
