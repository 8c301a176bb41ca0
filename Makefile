# Two commands on a fresh machine with Python and make: `make demo` and `make test`.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --quiet --disable-pip-version-check
PYTEST := $(RUN) -m pytest
FOR_DEMO := $(VENV)/.installed-demo
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo check test format lint types tests doctests codegen docs wheel bench bench-all bench-frameworks gpu clean

help:
	@echo "make demo     train on real data with and without clipping, in two minutes once installed"
	@echo "make check    lint, types and a part of the tests, in under two minutes"
	@echo "make test     demo, then every check"
	@echo "make gpu      test and measure on a GPU, in about eight minutes, for two files to send in"
	@echo "make format lint types tests doctests codegen docs wheel bench bench-all bench-frameworks clean: see CONTRIBUTING.md"

install: $(INSTALLED)

# Stamps are touched last: an install that was cut off is done again. The demo needs no tools.
$(FOR_DEMO): pyproject.toml setup.py constraints.txt $(wildcard native/*)
	@echo "Installing torch and the examples into $(VENV); the first time takes a few minutes."
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt setuptools
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[examples]'
	@touch $@

$(INSTALLED): $(FOR_DEMO)
	@echo "Installing the tools of all checks into $(VENV)."
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(FOR_DEMO)
	$(RUN) -m examples

test: demo lint types tests doctests codegen docs
	@echo "All checks passed."

# The inner loop: every rule, verb, policy and parameter group, on the native and the torch backend.
CHECKED := tests/rules $(addprefix tests/test_,calls.py messages.py refusals.py) \
	$(addprefix tests/clip/test_,gradients.py nonfinite.py norm.py scale.py) \
	$(addprefix tests/optim/test_,clipped_optimizer.py nonfinite.py param_groups.py runs.py skips.py)
check: lint types
	$(PYTEST) -n $(JOBS) --dist loadgroup -m "not exhaustive" $(CHECKED)

format: $(INSTALLED)
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

lint: $(INSTALLED)
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m bench.report --check
	$(VENV)/bin/zizmor --offline --quiet .github

types: $(INSTALLED)
	$(RUN) -m mypy

# Once on the native and the torch backend (and on the GPU, where there is one), once through the
# real kernels on CPU tensors. Triton reads TRITON_INTERPRET when it is imported: hence two processes.
tests: $(INSTALLED)
	$(PYTEST) -n $(JOBS) --dist loadgroup -m "not codegen and not exhaustive and not site"
	TRITON_INTERPRET=1 $(PYTEST) -n $(JOBS) --dist loadgroup -m "not exhaustive and not site"

doctests: $(INSTALLED)
	$(PYTEST) --doctest-modules tritonclip

codegen: $(INSTALLED)
	$(PYTEST) -n $(JOBS) --dist loadgroup tests/kernels -m codegen

# The site in build/docs/index.html; a browser loads each page where Chromium is installed.
docs: $(INSTALLED)
	rm -rf build/docs docs/api
	$(RUN) -m sphinx -W --keep-going -q -b html docs build/docs
	$(PYTEST) tests/package/test_site.py -m site

wheel: $(INSTALLED)
	$(PYTEST) tests/package/test_wheel.py

# The quick plan: under two minutes; ARGS="-k lenet5" chooses. `bench-all` measures all rows
# of bench/results on a CPU.
BENCH := $(PYTEST) --benchmark-only
bench: $(INSTALLED)
	$(BENCH) bench/test_clip.py bench/test_functional.py $(ARGS)

# A command for each file of rows.
CLIP = $(BENCH) bench/test_clip.py --device cpu
ROWS = --benchmark-json=bench/results
bench-all: $(INSTALLED)
	$(CLIP) $(ROWS)/cpu.json
	$(CLIP) --plan full $(ROWS)/cpu-epyc.json
	$(CLIP) --plan training $(ROWS)/cpu-training.json
	$(CLIP) --plan busy $(ROWS)/cpu-busy.json
	$(CLIP) --plan full --rule unit $(ROWS)/cpu-units.json
	TRITONCLIP_BACKEND=torch $(CLIP) $(ROWS)/cpu-torch-backend.json
	$(BENCH) bench/test_functional.py --device cpu --plan full $(ROWS)/functional-cpu.json
	$(BENCH) bench/test_accuracy.py $(ROWS)/accuracy-cpu.json
	$(BENCH) bench/test_host.py --plan full $(ROWS)/host.json
	$(BENCH) bench/test_distributed.py --plan full $(ROWS)/distributed.json
	$(BENCH) bench/test_features.py --plan full $(ROWS)/features.json
	$(BENCH) bench/test_training.py --plan full $(ROWS)/training.json
	$(BENCH) bench/test_advice.py --plan full $(ROWS)/advice.json
	$(RUN) -m bench.report

# On a machine with a GPU: on an H200 the tests took two minutes and the questions one; the rows of
# docs/performance/gpu.md, of which 13 cases of 82 were cut off, took three. A part that outlasts its
# time is interrupted, as by Ctrl-C, and its file has the rows so far.
UNTIL = timeout --foreground --signal=INT --kill-after=40
gpu: $(INSTALLED)
	-$(PYTEST) -n auto --maxprocesses 14 --dist loadgroup -m "gpu and not exhaustive" tests
	-$(UNTIL) 180 $(BENCH) bench/test_gpu.py --device cuda --benchmark-json=gpu.json
	-$(UNTIL) 360 $(BENCH) bench/test_clip.py --device cuda --plan gpu --provider torch \
		--benchmark-max-time 0.12 --benchmark-json=cuda.json
	@echo "Please send in gpu.json and cuda.json, and what failed."

# Needs TensorFlow, optax and Paddle. Two runs: a process that imports TensorFlow and Paddle ends.
EAGER = --provider torch --provider "torch foreach" --provider "torch no foreach"
BESIDE = $(CLIP) --plan frameworks $(EAGER)
bench-frameworks: $(INSTALLED)
	$(BESIDE) --provider tensorflow --provider optax $(ROWS)/cpu-optax-tensorflow.json
	$(BESIDE) --provider paddle $(ROWS)/cpu-paddle.json
	$(RUN) -m bench.report

clean:
	rm -rf build dist *.egg-info .benchmarks .nox .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
