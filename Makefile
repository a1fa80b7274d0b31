# Two commands matter: `make demo` and `make test`. Both make .venv on first use and find it ready after that.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml)))
EXAMPLES := $(patsubst %/,%,$(wildcard examples/*/))
# An example is a folder of scripts, or a whole distribution with src/.
TYPED := eplb_core $(wildcard plugins/*/src) \
	$(foreach example,$(EXAMPLES),$(firstword $(wildcard $(example)/src) $(example)))
# What `make` installs beside the core: the plugins, and the example that is a distribution as strangers write them.
DISTS := $(PLUGINS) $(patsubst %/pyproject.toml,%,$(wildcard examples/*/pyproject.toml))
# Tests at a time. Most of them wait for ranks, which are processes of their own, and for limits on purpose.
JOBS ?= 3
PYTEST := -m pytest --numprocesses $(JOBS) --dist worksteal

.PHONY: demo test floors vllm soak model mutants lint pytest pytest-optimized wheels clean
.NOTPARALLEL:

demo: $(VENV)/.installed
	$(BIN)/eplb demo

test: lint pytest pytest-optimized

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)

# The lowest versions that are declared, in environments of their own.
floors: $(VENV)/.installed
	.ci/floors.sh

# eplb-vllm on the real vLLM, on host memory, in an environment of its own: see there.
vllm: $(VENV)/.installed
	plugins/eplb-vllm/tests/run.sh $(CURDIR)/$(BIN)/python

# The ten slowest tests are named at the end, so that what grows is seen.
# pytest's own status is non-zero when nothing was collected; conftest.py makes it so when nothing passed either.
pytest: $(VENV)/.installed
	$(BIN)/python $(PYTEST) --durations 10

# Contracts must hold where Python drops `assert`. The asserts of the tests themselves survive: pytest rewrites those of
# test modules, tests/keep_asserts those of helpers and of the ranks that tests start, and tests/test_asserts.py fails
# where either stops working. pytest's warning that it cannot vouch for the rest is therefore switched off.
pytest-optimized: $(VENV)/.installed
	$(BIN)/python -O $(PYTEST) -m "not slow and not soak and not model and not gpu" \
		-W "ignore:assertions not in test modules:pytest.PytestConfigWarning"

soak: $(VENV)/.installed
	$(BIN)/python $(PYTEST) -m soak

# Every order of operations of the promise protocol where that takes minutes; `make test` tries the smaller cases.
model: $(VENV)/.installed
	$(BIN)/python $(PYTEST) -m model

# Every test of the conformance kit on every faulty backend, as a table; `make test` runs on each only the one meant for it.
mutants: $(VENV)/.installed
	$(BIN)/python -m tests.conformance_mutants.runner

wheels: $(VENV)/.installed
	rm -rf dist
	for dist in . $(PLUGINS); do (cd $$dist && $(CURDIR)/$(BIN)/hatchling build -d $(CURDIR)/dist) || exit 1; done

clean:
	rm -rf $(VENV) .venv-floors .venv-floors-3.10 .venv-vllm dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A stamp each for the environment and for what is in it: an interrupted step is repeated, a finished one is not.
$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "eplb-core needs Python 3.10 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.made requirements-dev.txt pyproject.toml $(DISTS:=/pyproject.toml)
	$(BIN)/python -m pip install --disable-pip-version-check \
		-r requirements-dev.txt -e '.[cli,prometheus,testing]' $(addprefix -e ,$(DISTS))
	touch $@
