# Every target does its own set-up: a fresh Debian 12 or Ubuntu machine with git and python3 is enough.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
PY := $(VENV)/bin/python
# Two workers suit the two cores that CI has; files stay whole, so that their fixtures are made once.
WORKERS ?= 2
PYTEST_ARGS ?=

.PHONY: help demo test test-quick lint bench soak setup lock clean

help:
	@echo 'make demo    build, verify and run examples/quickstart (under two minutes)'
	@echo 'make test    everything that CI runs: lint, types, all tests, real clients'
	@echo 'make test-quick  those without real clients and the long ones'
	@echo 'make lint    ruff, mypy and shellcheck'
	@echo 'make bench   the table of speeds and sizes, side by side with other tools'
	@echo 'make soak    long random loops (not part of make test)'
	@echo 'make lock    resolve requirements-dev.txt again'

setup:
	@scripts/setup.sh

demo:
	@scripts/demo.sh

test: setup lint
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m 'not soak' --durations 15 $(PYTEST_ARGS)

# Without the real clients and the long tests; for work in progress.
test-quick: setup
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m 'not soak and not interop and not slow' $(PYTEST_ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy
	@if command -v shellcheck >/dev/null; then \
	  git ls-files -z '*.sh' .ci/run | xargs -0 -r shellcheck; \
	else echo 'shellcheck is not installed: scripts are not checked'; fi

bench: setup
	@scripts/bench.sh $(BENCH_ARGS)

# Seconds for each fuzz target; kills, failing calls and flips take what they take.
SOAK ?= 300
soak: setup
	OCI_BUILDER_SOAK=$(SOAK) $(PY) -m pytest -n $(WORKERS) -m soak $(PYTEST_ARGS)

# No index, host or path may get into the lock: whoever uses it chooses where packages come from.
lock: setup
	$(PY) -m uv pip compile pyproject.toml requirements-dev.in --all-extras --universal --python-version 3.11 \
	  --no-header --no-emit-index-url --no-emit-find-links --quiet --upgrade -o requirements-dev.txt

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
