# make demo      4 ranks on this machine show what works
# make test      lint, types and all tests: what CI runs
# make test-312  all tests under Python 3.12 (test-313: 3.13), in an environment of its own
# make conformance  torch's own tests of distributed backends, unmodified, against rankmesh; some minutes
# make soak      the long forms of the tests: 20,000 messages from 64 threads, 20 s of computing, …
# make fuzz      some minutes of fuzzing: the parsers, then a live endpoint over a socket, then RPC
# make bench     rankmesh beside bare sockets, gloo, MPICH and ZeroMQ, in one run (installs them into .venv-bench)
# make bench-shm the same inside one host: shared memory beside MPICH's, and beside a plain copy
# make bench-rpc calls beside gRPC's, RPyC's, ZeroMQ's and torch's
# make bench-memory one-sided memory beside Mooncake's and MPICH's
# make bench-collectives  collectives of 2 and 4 ranks beside MPICH's and gloo's
# make bench-ddp DDP's steps and all_reduce by torch, over rankmesh and over gloo
# make format    rewrite the sources as ruff formats them
# make clean     remove the environments and caches
#
# PYTHON=/path/to/python3 picks the interpreter; ARGS="-k tcp -x" is passed on to pytest. Environments are made once,
# and again when pyproject.toml changes.

SHELL := /bin/bash
SHARES := pytest-torch pytest-rest pytest-services pytest-programs pytest-pure
.DELETE_ON_ERROR:
.PHONY: demo test test-312 test-313 lint pytest $(SHARES) conformance soak fuzz bench bench-shm bench-rpc \
    bench-memory bench-collectives bench-ddp format clean debian-python debian-ip debian-mooncake
# Where the environment forbids it, each of the many processes that the tests start would compile rankmesh anew.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
BIN = $(VENV)/bin
# Evaluated only where an environment is made; `|| exit` in the recipe stops make when no Python will do.
PYTHON ?= $$(scripts/find-python)
ARGS ?=

demo: $(VENV)/installed
	$(BIN)/rankmesh demo

# Two at a time, the longest first (tests/shares.py). With ARGS, one after the other: which tests they select is not
# known here.
ifeq ($(strip $(ARGS)),)
test: debian-ip $(VENV)/installed-dev
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint $(SHARES)
else
test: lint pytest
endif

pytest: debian-ip $(VENV)/installed-dev
	$(BIN)/python -m pytest $(ARGS)

$(SHARES): pytest-%: $(VENV)/installed-dev
	$(BIN)/python -m pytest --share $*

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-312 test-313: test-3%:
	@python=$$(scripts/find-python 3.$*) && $(MAKE) --no-print-directory pytest VENV=.venv-3.$* PYTHON="$$python"

conformance: $(VENV)/installed-dev
	$(BIN)/python tests/torch/conformance.py $(ARGS)

soak: debian-ip $(VENV)/installed-dev
	$(BIN)/python -m pytest -m soak $(ARGS)

fuzz: $(VENV)/installed-dev
	$(BIN)/python fuzz/wire.py --seconds 150
	$(BIN)/python fuzz/sockets.py --seconds 150
	$(BIN)/python fuzz/rpc.py --seconds 150

bench: .venv-bench/installed
	.venv-bench/bin/python bench/p2p.py $(ARGS)

bench-shm: .venv-bench/installed
	.venv-bench/bin/python bench/shm.py $(ARGS)

bench-rpc: .venv-bench/installed
	.venv-bench/bin/python bench/rpc.py $(ARGS)

bench-memory: .venv-bench/installed debian-mooncake
	.venv-bench/bin/python bench/memory.py $(ARGS)

bench-collectives: .venv-bench/installed
	.venv-bench/bin/python bench/collectives.py $(ARGS)

bench-ddp: .venv-bench/installed
	.venv-bench/bin/python bench/ddp.py $(ARGS)

.venv-bench/installed: pyproject.toml bench/requirements.txt | debian-python
	@python=$(PYTHON) || exit; echo "Making .venv-bench with $$python" && "$$python" -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check --requirement bench/requirements.txt --editable .
	@touch $@

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix-only --select I .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml | debian-python
	@python=$(PYTHON) || exit; echo "Making $(VENV) with $$python" && "$$python" -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

debian-python:
	@scripts/install-debian-packages python

debian-ip:
	@scripts/install-debian-packages ip

debian-mooncake:
	@scripts/install-debian-packages mooncake

clean:
	rm -rf .venv .venv-3.* .venv-bench .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
