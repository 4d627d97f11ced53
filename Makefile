# Common tasks. Needs python3 (3.11 or newer) and make; everything else is installed into .venv on the first call.
#
# make train                              the demo, on all GPUs or in two CPU processes
# make train CONFIG=run.yaml              your run, in one process; ARGS='stop.max_steps=10 ...' sets keys
# make train-distributed CONFIG=run.yaml  your run, on all GPUs; on several machines NODES=2 NODE_RANK=0 RENDEZVOUS=HOST:PORT
# make train-deepspeed CONFIG=run.yaml    your run, on all GPUs, by DeepSpeed: ZeRO-2, or as DEEPSPEED_CONFIG= says
# make train-tb | train-...-tb            the same with TensorBoard beside it until it ends; PORT=6006
# make eval | infer | merge CONFIG=...    of a finished run: loss again, answers (PROMPT='...'), adapter into the model
# make memory-check                       planned beside used memory of each GPU; CONFIG= a run file or a run's folder
# make gpu-info | setup-accelerate        the GPUs of this machine | what a start would use; ASK=1 asks
# make ui-demo                            the page on two finished runs and a live one; PORT=8765
# make tensorboard                        curves of runs/; LOGDIR=runs/NAME for one run, PORT=6006
# make test | test-ci | test-all          the fast tests | those of CI | all of them
# make test-device | test-gpu             tests of several ranks | tests that need a GPU, with the installed python3
# make check | fmt                        format, lint, types, layers, documentation | fixes what can be fixed
# make docs                               the documentation site, in build/site; links are checked
# make wheel                              the wheel, in dist/
# make equality                           measures docs/equality.md
# make faults                             goes on measuring docs/faults.md; ARGS='--limit-s 600 --at-once 2'
# make clean                              removes .venv and all caches, but not runs/
#
# CONFIG= is a run file of ours or of another tool (docs/coming-from.md); DEEPSPEED_CONFIG= and ACCELERATE_CONFIG= say
# how to distribute it. A variable that the target does not read is an error.
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
# What `accelerate config` has written, if anything: `make train-distributed` starts as it says; none leaves it out.
ACCELERATE_CONFIG ?= $(wildcard $(or $(HF_HOME),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/huggingface)/accelerate/default_config.yaml)

# The variables that each target reads.
PLACE := NODES NODE_RANK RENDEZVOUS
RUNS := train train-tb train-distributed train-distributed-tb train-deepspeed train-deepspeed-tb
OF_A_RUN := eval infer merge memory-check
$(foreach target,$(RUNS) $(OF_A_RUN),$(eval READS.$(target) := CONFIG ARGS))
$(foreach target,$(RUNS),$(eval READS.$(target) += DEEPSPEED_CONFIG))
$(foreach target,$(filter %distributed %distributed-tb,$(RUNS)),$(eval READS.$(target) += ACCELERATE_CONFIG $(PLACE)))
$(foreach target,$(filter %-tb,$(RUNS)) tensorboard,$(eval READS.$(target) += PORT))
READS.infer += PROMPT
READS.tensorboard += LOGDIR CONFIG
READS.ui-demo := PORT
READS.setup-accelerate := ASK
READS.equality := ARGS
READS.faults := ARGS
$(foreach target,test test-ci test-all test-device test-gpu,$(eval READS.$(target) := PYTEST_ARGS))
ALWAYS_READ := MANYHANDS_% BOOTSTRAP HF_HOME HF_% CUDA_VISIBLE_DEVICES NCCL_% OMP_NUM_THREADS SHELL MAKE%

# Nothing that is written on the command line is ignored; make's own calls of itself inherit what was meant for others.
ifeq ($(MAKELEVEL),0)
GOALS := $(or $(MAKECMDGOALS),help)
GIVEN := $(foreach name,$(filter-out -%,$(.VARIABLES)),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
UNREAD := $(strip $(filter-out $(ALWAYS_READ) $(foreach goal,$(GOALS),$(READS.$(goal))),$(GIVEN)))
NUMBERS := $(if $(filter $(RUNS),$(GOALS)),$(filter NPROC NPROC_PER_NODE NUM_PROCESSES NUM_GPUS N_GPUS NGPUS GPUS,$(UNREAD)))
INSTEAD := $(if $(NUMBERS),: ARGS='parallel.gpus=N' is the number of GPUs)
$(if $(UNREAD),$(error make $(GOALS) does not read $(UNREAD)$(or $(INSTEAD),; it reads: $(or \
$(sort $(foreach goal,$(GOALS),$(READS.$(goal)))),nothing))))
endif

ifdef MANYHANDS_PYTHON
PYTHON := $(MANYHANDS_PYTHON)
READY :=
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PYTHON := .venv/bin/python
READY := .venv/.installed
endif

# Tests run file by file in one process per core, four at most, the longest first (tests/conftest.py); PYTEST_ARGS='-n 0' runs them in one process.
# A process that dies ends the run with its test's name: where xdist 3.8 starts another one, --dist loadfile then waits forever.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# The model for tests that need a real one; see src/manyhands/demo/model.py.
SMOLLM2 := .venv/smollm2
export MANYHANDS_SMOLLM2 ?= $(if $(wildcard $(SMOLLM2)/model.safetensors),$(abspath $(SMOLLM2)))
# torchvision for the tests of models whose images it prepares. Beside the environment: transformers imports it wherever
# it is installed, and beside a torch for CPUs its build for CUDA is imported by those tests alone.
TORCHVISION := .venv/torchvision
export MANYHANDS_TORCHVISION ?= $(if $(wildcard $(TORCHVISION)/torchvision),$(abspath $(TORCHVISION)))
# Otherwise each process of torch uses all cores; the worker sets its number from the plan.
test test-ci test-all equality faults: export OMP_NUM_THREADS ?= 1

.PHONY: help $(RUNS) $(OF_A_RUN) setup-accelerate test test-ci test-all test-device test-gpu check fmt docs wheel equality \
	gpu-info tensorboard ui-demo clean

help:
	@sed -n '3,25s/^# \{0,1\}//p' Makefile

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

MANYHANDS := $(PYTHON) -m manyhands
NEEDS_CONFIG = $(if $(CONFIG),,echo "which run? make $@ CONFIG=run.yaml" >&2; exit 2;)
WITH_DEEPSPEED := $(if $(DEEPSPEED_CONFIG),--deepspeed '$(DEEPSPEED_CONFIG)')
WITH_NODES := $(if $(NODES),--nodes '$(NODES)') $(if $(NODE_RANK),--node-rank '$(NODE_RANK)') \
$(if $(RENDEZVOUS),--rendezvous '$(RENDEZVOUS)')
WITH_TENSORBOARD = $(if $(filter %-tb,$@),--tensorboard --port $(PORT))
# Their number in ARGS, in either spelling, takes the place of the target's own.
ONE_GPU = $(if $(findstring parallel.gpus=,$(ARGS)),,--gpus 1)
ALL_GPUS = $(if $(findstring --gpus,$(ARGS)),,parallel.gpus=auto)
WITH_ACCELERATE := $(if $(filter-out none,$(ACCELERATE_CONFIG)),--accelerate-config '$(ACCELERATE_CONFIG)')

train train-tb: $(READY)
ifeq ($(CONFIG),)
	@$(PYTHON) -m manyhands.demo $(WITH_DEEPSPEED) $(WITH_TENSORBOARD) $(ARGS)
else
	@$(MANYHANDS) train '$(CONFIG)' $(ONE_GPU) $(WITH_DEEPSPEED) $(WITH_TENSORBOARD) $(ARGS)
endif

train-distributed train-distributed-tb: $(READY)
	@$(NEEDS_CONFIG) $(MANYHANDS) train '$(CONFIG)' $(or $(WITH_ACCELERATE),$(ALL_GPUS)) $(WITH_DEEPSPEED) \
	$(WITH_NODES) $(WITH_TENSORBOARD) $(ARGS)

# ZeRO-2, or what DEEPSPEED_CONFIG= says. Without the package a file would be carried out by FSDP2: not under this name.
train-deepspeed train-deepspeed-tb: $(READY)
	@$(NEEDS_CONFIG) $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(0 if u.find_spec("deepspeed") else \
	"error: make $@ needs DeepSpeed\n  fix: pip install deepspeed, or make $(subst deepspeed,distributed,$@)")'
	@$(MANYHANDS) train '$(CONFIG)' $(ALL_GPUS) $(or $(WITH_DEEPSPEED),parallel.strategy=zero2) \
	$(WITH_TENSORBOARD) $(ARGS)

eval: $(READY)
	@$(NEEDS_CONFIG) $(MANYHANDS) eval '$(CONFIG)' $(ARGS)

infer: export PROMPT := $(PROMPT)
infer: $(READY)
	@$(NEEDS_CONFIG) $(MANYHANDS) $(if $(PROMPT)$(findstring --input,$(ARGS)),generate,chat) '$(CONFIG)' \
	$(if $(PROMPT),--prompt="$$PROMPT") $(ARGS)

merge: $(READY)
	@$(NEEDS_CONFIG) $(MANYHANDS) export '$(CONFIG)' --merge $(ARGS)

memory-check: $(READY)
	@$(MANYHANDS) memory-check $(if $(CONFIG),'$(CONFIG)') $(ARGS)

setup-accelerate: $(READY)
	@$(MANYHANDS) setup-accelerate $(if $(ASK),--ask)

test: $(READY)
	@$(PYTHON) -m pytest -q $(SIDE_BY_SIDE) -m "not ci and not slow and not real and not gpu" $(PYTEST_ARGS)

test-ci: WITHOUT := -m "not nightly" --durations=25
test-all test-ci: $(READY)
	@test -s $(SMOLLM2)/model.safetensors || $(PYTHON) -m manyhands.demo.model $(SMOLLM2)
	@test -d $(TORCHVISION)/torchvision || $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps \
	--target $(TORCHVISION) -c constraints.txt torchvision 2> >(grep -v 'is ignored: it is neither' >&2) || \
	echo "torchvision could not be installed: the tests of models whose images it prepares are skipped" >&2
	@MANYHANDS_TORCHVISION=$${MANYHANDS_TORCHVISION:-$(abspath $(TORCHVISION))} \
	MANYHANDS_SMOLLM2=$${MANYHANDS_SMOLLM2:-$(abspath $(SMOLLM2))} $(PYTHON) -m pytest -q $(SIDE_BY_SIDE) $(WITHOUT) $(PYTEST_ARGS)

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
	@$(BUILD_DOCS) --quiet

# Warnings are errors: a link to nowhere, a page that is not in the navigation. The variable silences an advertisement.
BUILD_DOCS = NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

docs: $(READY)
	@$(BUILD_DOCS)
	@echo "open build/site/index.html"

wheel: $(READY)
	@$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

fmt: $(READY)
	@$(PYTHON) -m ruff check --silent --fix --exit-zero .
	@$(PYTHON) -m ruff format --quiet .

equality: $(READY)
	@$(PYTHON) -m tests.support.equality $(or $(ARGS),--page)
	@$(if $(ARGS),,$(PYTHON) -m tests.support.equality --images --page)
	@$(if $(ARGS),,$(PYTHON) -m tests.support.equality --engine deepspeed --page)

faults: $(READY)
	@$(PYTHON) -m tests.faults.matrix --output docs/faults.md $(ARGS)

ui-demo: $(READY)
	@$(PYTHON) -m manyhands.demo.page $(if $(findstring command,$(origin PORT)),--port $(PORT))

gpu-info: $(READY)
	@$(MANYHANDS) gpu-info

tensorboard: $(READY)
	@$(MANYHANDS) tensorboard '$(or $(CONFIG),$(LOGDIR))' --port $(PORT)

clean:
	@rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "removed .venv and all caches, but not runs/"
