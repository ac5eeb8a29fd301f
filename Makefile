# Every target sets up what it needs, on any machine with make and Python 3.11 or later: an environment of its own in
# .venv, made once and renewed when a pyproject.toml changes. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PLUGINS := $(wildcard plugins/*)

.DEFAULT_GOAL := help
.PHONY: help quickstart test quality style bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

quickstart: $(READY) ## train, stitch, score, save and load small networks
	$(BIN)/hf-stitch quickstart

# One thread to a worker: more would fight over the same cores.
test: $(READY) ## run tests and doctests, of the plugins too (slow ones: make test ARGS="-m slow")
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n auto $(ARGS)

quality: $(READY) ## check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

style: $(READY) ## repair style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## run the benchmarks
	$(BIN)/python -m benchmarks

clean: ## remove the environment and everything cached
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis

# uv installs many times faster than pip, which has only to fetch it.
$(READY): pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	command -v uv >/dev/null || test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	PATH="$$PATH:$(CURDIR)/$(BIN)" uv pip install --python $(BIN)/python -e ".[dev]" $(addprefix -e ./,$(PLUGINS))
	touch $@
