# One command for each chore. `make` alone lists them.

PYTHON ?= python3
WORKERS ?= 2
JOBS ?= 0
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --constraint constraints.txt

# The Python that is named, or else that of .venv, or else whatever the machine has.
GPU_PY = $(if $(filter command,$(firstword $(origin PYTHON))),$(PYTHON),$(if $(wildcard $(PY)),$(PY),$(PYTHON)))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# With it, each of the many processes of the tests would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all check docs bench gpu-check wheels venv clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s%s\n", $$1, $$2 }' Makefile

demo: $(VENV)/stamp-demo  ## denoise a real image, show what it did (output: demo/)
	$(PY) examples/retina.py --out demo --workers $(WORKERS) $(ARGS)

test: $(VENV)/stamp-oracles  ## run the tests but the thorough ones; JOBS=2: two files at once
	$(PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-all: override ARGS += --thorough
test-all: test  ## run all tests; takes JOBS and ARGS as test does

check: $(VENV)/stamp-test  ## ruff, mypy --strict, import-linter, doctests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict
	$(VENV)/bin/lint-imports
	$(PY) -m pytest --doctest-modules halotile

docs: $(VENV)/stamp-docs  ## build the website into site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo "site/index.html"

bench: $(VENV)/stamp-peers $(if $(findstring training,$(ARGS)),$(VENV)/stamp-careamics) $(if $(findstring variational,$(ARGS)),$(VENV)/stamp-nifty)  ## measure against the peers (table: docs/benchmarks.md)
	$(PY) tests/benchmarks/run.py $(ARGS)

# It installs nothing: where there is a GPU there may be no package index. A test that fails does not keep the table from being made.
gpu-check:  ## on a machine with a GPU: its tests and its table
	@$(GPU_PY) -c 'import torch, dask, zarr, pytest' || { \
	  echo "$(GPU_PY) lacks what halotile needs. Write: make gpu-check PYTHON=/path/to/python, or see docs/gpu.md" >&2; exit 2; }
	@$(GPU_PY) tests/benchmarks/bench_gpu.py --look
	@outcome=0; \
	$(GPU_PY) -m pytest tests/gpu -m gpu --thorough --gpu-device cuda || outcome=$$?; \
	if [ $$outcome = 5 ]; then echo "no test was collected: nothing of the GPU was tested" >&2; fi; \
	$(GPU_PY) tests/benchmarks/bench_gpu.py $(ARGS) || outcome=$$?; \
	exit $$outcome

wheels:  ## fetch what a machine with a GPU and no package index needs (docs/gpu.md)
	$(PYTHON) -m pip download --only-binary=:all: --no-deps --python-version 3.12 --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	  -c constraints.txt -r requirements-gpu-wheels.txt -d wheels
	$(PYTHON) -m pip wheel --no-deps -w wheels .

venv: $(VENV)/stamp-oracles  ## make .venv with everything the tests need

clean:  ## remove .venv, caches and demo output
	rm -rf $(VENV) demo site bench-results wheels .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says that an extra was installed from these very requirements. A stamp that is up to date
# costs nothing, and a half-made environment has none.
$(VENV)/stamp-created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "halotile needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`." >&2; \
	  echo "Write: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) -m venv failed. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

KERNELS := hatch_build.py halotile/tasks/convolution/median_networks.py $(wildcard halotile/tasks/denoisers/compiled/*.[ch])

$(VENV)/stamp-%: $(VENV)/stamp-created pyproject.toml constraints.txt $(KERNELS)
	@echo "Installing halotile[$*] into $(VENV): some minutes the first time ..."
	@$(INSTALL) --editable ".[$*]"
	@touch $@

$(VENV)/stamp-oracles: $(VENV)/stamp-test requirements-oracles.txt
	@$(INSTALL) --no-deps --requirement requirements-oracles.txt
	@touch $@

$(VENV)/stamp-peers: $(VENV)/stamp-bench requirements-peers.txt
	@$(INSTALL) --no-deps --requirement requirements-peers.txt
	@touch $@

$(VENV)/stamp-careamics: $(VENV)/stamp-created requirements-careamics.txt
	@echo "Installing CAREamics into $(VENV)/careamics: some minutes, 5 GB ..."
	@$(PYTHON) -m venv $(VENV)/careamics
	@$(VENV)/careamics/bin/python -m pip install --quiet --requirement requirements-careamics.txt
	@touch $@

$(VENV)/stamp-nifty: $(VENV)/stamp-created requirements-nifty.txt
	@echo "Installing NIFTy into $(VENV)/nifty ..."
	@$(PYTHON) -m venv $(VENV)/nifty
	@$(VENV)/nifty/bin/python -m pip install --quiet --requirement requirements-nifty.txt
	@touch $@
