# Common tasks. Needs python3 (3.11 or newer) and make; everything else is installed into .venv on the first call.
#
# make train                              the demo, on all GPUs or in two CPU processes
# make train CONFIG=run.yaml              your run, in one process; ARGS='stop.max_steps=10 ...' sets keys
# make train-distributed CONFIG=run.yaml  your run, on all GPUs
# make gpu-info                           the GPUs of this machine
# make tensorboard                        curves of runs/; LOGDIR=runs/NAME for one run, PORT=6006
# make test | test-all                    the fast tests | all of them
# make test-device | test-gpu             tests of several ranks | tests that need a GPU, with the installed python3
# make check | fmt                        format, lint, types, layers | fixes what can be fixed
# make equality                           measures docs/equality.md
# make clean                              removes .venv and all caches, but not runs/
#
# MANYHANDS_PYTHON=/path/to/python uses an interpreter in which everything is installed, and installs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BOOTSTRAP ?= python3
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
CONFIG ?=
ARGS ?=
PYTEST_ARGS ?=
LOGDIR ?= runs
PORT ?= 6006

ifdef MANYHANDS_PYTHON
PYTHON := $(MANYHANDS_PYTHON)
READY :=
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PYTHON := .venv/bin/python
READY := .venv/.installed
endif

# The fast tests run file by file in one process per core, four at most; PYTEST_ARGS='-n 0' runs them in one process.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile

# The model for tests that need a real one; see src/manyhands/demo/model.py.
SMOLLM2 := .venv/smollm2
export MANYHANDS_SMOLLM2 ?= $(if $(wildcard $(SMOLLM2)/model.safetensors),$(abspath $(SMOLLM2)))
# Otherwise each process of torch uses all cores; the worker sets its number from the plan.
test test-all equality: export OMP_NUM_THREADS ?= 1

.PHONY: help train train-distributed test test-all test-device test-gpu check fmt equality gpu-info tensorboard clean

help:
	@sed -n '3,15s/^# \{0,1\}//p' Makefile

# torch is installed first and by its exact version: with a range, pip may download builds of several GB more than once.
.venv/.installed: pyproject.toml constraints.txt
	@$(BOOTSTRAP) -c 'import sys; sys.exit("manyhands needs Python 3.11 or newer, $(BOOTSTRAP) is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "creating .venv ($$($(BOOTSTRAP) --version))"
	@$(BOOTSTRAP) -m venv .venv
	@echo "installing $(TORCH) (the largest part; a build for GPUs has several GB)"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH) 2> >(grep -v 'is ignored: it is neither' >&2)
	@echo "installing manyhands and what it needs, as pinned in constraints.txt"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev,demo,peft]' 2> >(grep -v 'is ignored: it is neither' >&2)
	@touch $@

train: $(READY)
ifeq ($(CONFIG),)
	@$(PYTHON) -m manyhands.demo $(ARGS)
else
	@$(PYTHON) -m manyhands train $(CONFIG) --gpus 1 $(ARGS)
endif

train-distributed: $(READY)
	@$(if $(CONFIG),,echo "which run? make train-distributed CONFIG=run.yaml" >&2; exit 2;) \
	$(PYTHON) -m manyhands train $(CONFIG) parallel.gpus=auto $(ARGS)

test: $(READY)
	@$(PYTHON) -m pytest -q $(SIDE_BY_SIDE) -m "not slow and not real and not gpu" $(PYTEST_ARGS)

test-all: $(READY)
	@test -s $(SMOLLM2)/model.safetensors || $(PYTHON) -m manyhands.demo.model $(SMOLLM2)
	@MANYHANDS_SMOLLM2=$${MANYHANDS_SMOLLM2:-$(abspath $(SMOLLM2))} $(PYTHON) -m pytest -q $(PYTEST_ARGS)

# For a machine without a network: uses the installed python3. Missing packages may be supplied as .device/site.txz.
test-device test-gpu: export OMP_NUM_THREADS := 1
test-device test-gpu: export PYTHONPATH := src:/tmp/manyhands-site/site$(if $(PYTHONPATH),:$(PYTHONPATH))
CARRIED := if test -s .device/site.txz; then mkdir -p /tmp/manyhands-site && tar xJf .device/site.txz -C /tmp/manyhands-site; fi

test-device:
	@$(CARRIED)
	@python3 -m pytest -q -p no:cacheprovider -m "distributed and not slow" $(PYTEST_ARGS)

# Only tests marked gpu; some need two GPUs and are skipped on one. PYTEST_ARGS='-k fp8' selects some of them.
# A test that hangs prints its stack after two minutes, even without pytest-timeout.
test-gpu:
	@$(CARRIED)
	@python3 -c 'import sys, time, torch, transformers as t; \
	num = torch.cuda.device_count() if torch.cuda.is_available() else sys.exit("make test-gpu: torch sees no CUDA GPU"); \
	print(time.strftime("%F"), num, "x", torch.cuda.get_device_name(0) + ", torch", torch.__version__ + ", transformers", t.__version__)'
	@python3 -m pytest -q -p no:cacheprovider -o faulthandler_timeout=120 --durations=10 -m gpu $(PYTEST_ARGS) \
	$$(grep -rl --include='test_*.py' 'mark\.gpu' tests)

check: $(READY)
	@$(PYTHON) -m ruff format --check --quiet . || { echo "some files are not formatted: make fmt" >&2; exit 1; }
	@$(PYTHON) -m ruff check --quiet .
	@$(PYTHON) -m mypy
	@PYTHONPATH=src $(PYTHON) -c 'from importlinter.cli import lint_imports_command; lint_imports_command(["--no-logo"])'

fmt: $(READY)
	@$(PYTHON) -m ruff check --silent --fix --exit-zero .
	@$(PYTHON) -m ruff format --quiet .

equality: $(READY)
	@$(PYTHON) -m tests.support.equality $(or $(ARGS),--output docs/equality.md)

gpu-info: $(READY)
	@$(PYTHON) -m manyhands gpu-info

tensorboard: $(READY)
	@$(PYTHON) -m manyhands tensorboard $(LOGDIR) --port $(PORT)

clean:
	@rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "removed .venv and all caches, but not runs/"
