# Each target sets up its own environment when it is missing or what it is made from has changed, and is safe to repeat.
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
.PHONY: help setup demo test test-core test-integrations test-vision check docs bench parallel-matrix clean

help:
	@echo "make demo | test | test-core | test-integrations | test-vision | check | docs | bench | parallel-matrix | setup | clean"
	@echo "variables: TORCH=$(TORCH) PYTHON=$(PYTHON) ARGS=\"$(ARGS)\""

setup: $(READY)

# The mark is taken away before anything is installed and put back last, so an interrupted set-up is never taken for a
# finished one: without the mark, the environment is made anew. torch comes first and alone, so that pip takes the build
# that its configuration prefers, and nothing later pulls in another.
$(READY): pyproject.toml build_native.py $(wildcard src/lowtide/_native*.h src/lowtide/*/_native*.[ch])
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

# With arguments for pytest, the core tests alone: they name tests, or say how to run some.
test: test-core $(if $(ARGS),,test-integrations)

# In as many processes as there are cores, and four at most: each takes half a gigabyte and more. ARGS="-n 0" is one process.
PYTEST := -m pytest -n logical --maxprocesses 4 --dist worksteal
# What fails beside others is run once more by itself: on a machine that is short of memory or time, tests of several processes fail
# that are right. What fails again is wrong; what does not is named in the output and should not stay so.
ALONE := -m pytest -n 0 --last-failed --last-failed-no-failures none -rA --show-capture no --no-header

COMPILED := tests/engine tests/failures tests/trace

test-core: $(READY)
	"$(BIN)/python" $(PYTEST) $(ARGS) || { test -z '$(ARGS)' && echo "once more, one by one: what failed" && "$(BIN)/python" $(ALONE); }
ifeq ($(ARGS),)
	@echo "once more: the tests of what is compiled, with the inner loops in Python"
	LOWTIDE_NATIVE=0 "$(BIN)/python" $(PYTEST) $(COMPILED) || LOWTIDE_NATIVE=0 "$(BIN)/python" $(ALONE) $(COMPILED)
endif

# Other libraries lie in an environment on top of the core one, which sees what is in that (torch above all) and never changes it.
# The constraint has pip refuse a library that wants another torch, rather than fetch it.
LIBRARIES_OF_integrations := transformers peft accelerate lightning diffusers
LIBRARIES_OF_vision := torchvision timm
VISION_TORCH := 2.14.1
VISION_CONSTRAINT := torchvision==0.29.1

test-integrations: $(VENV)-integrations/.ready-$(PYTAG)
	export LOWTIDE_TEST_LIBRARIES="$(LIBRARIES_OF_integrations)"; \
	"$(VENV)-integrations/bin/python" $(PYTEST) tests/integrations $(ARGS) || \
	{ test -z '$(ARGS)' && echo "once more, one by one: what failed" && "$(VENV)-integrations/bin/python" $(ALONE) tests/integrations; }

# torchvision has compiled parts, so each release of it goes with one of torch.
test-vision:
	@$(MAKE) --no-print-directory TORCH=$(VISION_TORCH) test-vision-here

test-vision-here: $(VENV)-vision/.ready-$(PYTAG)
	LOWTIDE_TEST_LIBRARIES="$(LIBRARIES_OF_vision)" "$(VENV)-vision/bin/python" $(PYTEST) tests/integrations/test_vision.py $(ARGS)

$(VENV)-%/.ready-$(PYTAG): $(READY)
	@echo "setting up $(VENV)-$* with $(LIBRARIES_OF_$*); the first time takes a few minutes"
	@rm -rf "$(VENV)-$*"
	@"$(BIN)/python" -m venv --without-pip "$(VENV)-$*"
	@"$(BIN)/python" -c 'import site, sys, sysconfig; paths = sysconfig.get_paths(vars={"base": sys.argv[1], "platbase": sys.argv[1]}); open(paths["purelib"] + "/core.pth", "w").write(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")' "$(VENV)-$*"
	@printf '%s\n' "torch==$(TORCH)" $(if $(filter vision,$*),"$(VISION_CONSTRAINT)") > "$(VENV)-$*/constraints.txt"
	"$(VENV)-$*/bin/python" -m pip install -qq --constraint "$(VENV)-$*/constraints.txt" --editable ".[test-$*]"
	@touch "$@"

check: $(READY)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/python" -m pytest -q tests/test_layout.py
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --quiet --strict

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict

bench: $(READY)
	@set -e; for file in $(filter-out benchmarks/parallel_matrix.py,$(wildcard benchmarks/[!_]*.py)); do echo "== $$file"; "$(BIN)/python" "$$file" $(ARGS); done

parallel-matrix: $(READY)
	OMP_WAIT_POLICY=passive "$(BIN)/python" benchmarks/parallel_matrix.py $(ARGS)

clean:
	rm -rf .venv .venv-* site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
