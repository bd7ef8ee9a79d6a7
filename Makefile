# What a person types. `make demo` shows the library at work on a real model, `make test` checks it; `make help` lists the rest.
# Everything lands in .venv/, .models/ and build/. A step is done again only when something it is made from has changed.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
MOE := .models/smollm2-moe-16x.gguf
PROMPT := The capital of France is
# pytest arguments, as in: make test ARGS="tests/unit -x"
ARGS ?=
# a peer for `make bench`, as in: make bench PEER=path/to/llama-bench
PEER ?=
SOURCES := pyproject.toml setup.py $(shell find engine capi include -name '*.py' -o -name '*.c' -o -name '*.h' -o -name '*.in' -o -name '*.map')

export PKG_CONFIG_PATH := $(CURDIR)/.venv/lib/pkgconfig
export TIMEFORMAT := (%1R s, loading included)

define HELLO
import vllm_cpp
with vllm_cpp.load("$(MOE)") as model:
    for piece in model.stream("$(PROMPT)", max_tokens=16, temperature=0):
        print(piece, end="", flush=True)
    print()
endef
export HELLO

.PHONY: help check demo test node lint format docs bench lock clean distclean

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

check: # what must be on the machine already, and how to get it
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(PYTHON) is missing or older than 3.11: apt-get install python3 python3-venv python3-dev, or make PYTHON=path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make environments: apt-get install python3-venv" >&2; exit 1; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { \
	  echo "the headers of $(PYTHON) are missing: apt-get install python3-dev" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "no C compiler: apt-get install gcc libc6-dev" >&2; exit 1; }
	@command -v pkg-config >/dev/null || { echo "no pkg-config: apt-get install pkg-config" >&2; exit 1; }

.venv/.made: requirements/dev.txt
	@$(MAKE) check
	@echo "== a virtual environment in .venv"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements/dev.txt
	@touch $@

.venv/.installed: .venv/.made $(SOURCES)
	@echo "== the library"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	@$(BIN)/python -m pip check --quiet || { echo "requirements/dev.txt is behind pyproject.toml: make lock" >&2; exit 1; }
	@touch $@

$(MOE): benchmarks/fetch_smollm2.py benchmarks/make_moe.py benchmarks/gguf_out.py | .venv/.installed
	@echo "== SmolLM2-135M-Instruct, and a mixture of 16 experts made from it"
	@rm -f $@
	@$(BIN)/python -m benchmarks.fetch_smollm2
	@touch $@

build/complete: examples_c/complete.c .venv/.installed
	@mkdir -p build
	@echo "== a C program, linked to the installed library"
	cc -std=c11 -Wall -Wextra $< $$(pkg-config --cflags --libs vllm) -o $@

demo: .venv/.installed $(MOE) build/complete ## a real mixture of experts completes a sentence: from C, the shell and Python
	@echo; echo "== C"
	time build/complete $(MOE) "$(PROMPT)"
	@echo; echo "== the shell"
	time $(BIN)/vllm-cli --model $(MOE) --prompt "$(PROMPT)" --max-tokens 16
	@echo; echo "== Python"; echo "$$HELLO"; echo
	@time $(BIN)/python -c "$$HELLO"

test: .venv/.installed $(MOE) ## all tests, against the installed library
	@$(BIN)/python -m pytest $(ARGS)

node: ## fetch koffi into build/: with it, the tests run a Node host as well
	@mkdir -p build
	npm install --silent --no-audit --no-fund --prefix build koffi@2.16.3

lint: .venv/.installed ## ruff, and the floors of the house
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=engine:capi $(BIN)/lint-imports

format: .venv/.made ## let ruff put the sources in shape
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

docs: .venv/.installed ## write the generated parts of docs/ again
	@$(BIN)/python docs/generate.py

bench: .venv/.installed $(MOE) ## tokens per second, beside llama.cpp with PEER=path/to/llama-bench
	@$(BIN)/python -m benchmarks.decode $(MOE) $(if $(PEER),--peer $(PEER)) $(ARGS)

lock: ## write requirements/dev.txt again, from the bounds in pyproject.toml
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet --disable-pip-version-check pip-tools
	@CUSTOM_COMPILE_COMMAND="make lock" build/lock/bin/pip-compile --quiet --upgrade --extra dev --strip-extras --allow-unsafe --no-annotate \
	  --no-emit-options --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --output-file requirements/dev.txt pyproject.toml

clean: ## remove what was built; .venv and .models stay
	rm -rf build dist *.egg-info capi/vllm_capi/lib capi/vllm_capi/include .venv/.installed

distclean: clean ## remove the environment and the models too
	rm -rf .venv .models
