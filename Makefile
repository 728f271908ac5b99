# make setup | fast | test | slow | distributed | check | docs
# CONTRIBUTING.md says when to run which. PYTHON chooses the interpreter of the new environment.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup fast test slow distributed check docs

setup: $(BIN)/steplab

$(BIN)/steplab: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# Packages whose tests start no process, compile nothing and interpret no kernel: under a minute.
FAST := architecture compare core costs data findings forecasting hardware lint meter modules \
    report step store trace tune
fast: setup
	$(BIN)/python -m pytest -q -n 3 -m 'not slow' $(addprefix tests/,$(FAST))

# The README's test command: all but the slow tests, twelve minutes on two cores.
test: setup
	$(BIN)/python -m pytest -q -n 3 -m 'not slow'

slow: setup
	$(BIN)/python -m pytest -q -n 3 -m slow

# All that starts ranks, the slow ones too, on up to four CPU ranks: under three minutes, two cores.
DISTRIBUTED := $(wildcard tests/*/test_rank*.py) tests/parallel tests/bench/test_collectives.py \
    tests/bench/test_ddp.py tests/probes/test_communication.py tests/train/test_launch.py \
    tests/train/test_watch.py
distributed: setup
	$(BIN)/python -m pytest -q -n 2 $(DISTRIBUTED)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src docs examples benchmarks ./*.md

docs: setup
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
