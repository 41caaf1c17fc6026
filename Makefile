# make demo: a round trip through a server of your own; make test: everything that is checked.
PYTHON ?= python3
VENV ?= .venv
# For the demo: a checkpoint's folder or hub id, and a sound file; without them random weights and a sound it makes.
MODEL ?=
WAV ?=
DEVICE ?= cpu
REFERENCE_VERSION = 0.30.0
# Versions of vllm and of vllm-omni, which go together, that the plugin is tested in.
ENGINE ?= 0.30.0 0.28.0

bin = $(VENV)/bin
reference = .cache/reference
# For the benchmark: the folder of another unpacked wheel; flags of benchmarks/published.py.
REFERENCE ?= $(reference)
BENCH_ARGS ?=
engine = .cache/engine

.PHONY: demo test test-robustness test-gpu test-engine $(ENGINE:%=test-engine-%) bench lint format stubs reference clean

demo: $(VENV)/.server
	$(bin)/python scripts/demo.py --device '$(DEVICE)' $(if $(MODEL),--model '$(MODEL)') $(if $(WAV),--wav '$(WAV)')

test: $(VENV)/.test $(reference)/.unpacked
	$(bin)/python -m pytest $(PYTEST_ARGS)

# Chaos for two minutes, ten minutes of mixed traffic, and the rest of tests/robustness at full length.
test-robustness: $(VENV)/.test
	MIMO_ROBUSTNESS=full $(bin)/python -m pytest tests/robustness $(PYTEST_ARGS)

# On a machine with an NVIDIA GPU.
test-gpu: $(VENV)/.test
	$(bin)/python -m pytest tests/gpu $(PYTEST_ARGS)

# The plugin in real engines, each with the packages of an environment of their own; ENGINE=0.30.0 runs one of them.
# Installed uncompiled, since little of it is ever imported; what is must then be kept compiled, or each of the tests'
# processes takes 20 s more: hence PYTHONDONTWRITEBYTECODE, which means nothing when it is empty.
test-engine: $(ENGINE:%=test-engine-%)

$(ENGINE:%=test-engine-%): test-engine-%: $(engine)/.packages $(engine)/%/.installed $(VENV)/.test $(reference)/.unpacked
	PYTHONPATH='$(abspath $(engine))/$*' MIMO_TEST_ENGINE='$*' MIMO_TEST_SERVER_PYTHON='$(abspath $(bin))/python' \
		PYTHONDONTWRITEBYTECODE= $(engine)/bin/python -m pytest tests/vllm_omni_patch -p no:cacheprovider $(PYTEST_ARGS)

# Beside the reference at the published size: half an hour; BENCH_ARGS='--only decode-280,encode-4' for some of it.
bench: $(VENV)/.test $(if $(filter $(reference),$(REFERENCE)),$(reference)/.unpacked)
	$(bin)/python benchmarks/published.py --device '$(DEVICE)' --reference '$(REFERENCE)' $(BENCH_ARGS)

lint: $(VENV)/.lint
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

format: $(VENV)/.lint
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

# The gRPC stubs, which are kept in git; tests/packaging fails when they differ from the .proto.
stubs:
	PYTHON='$(PYTHON)' scripts/generate_stubs.sh

# The implementation that the parity tests compare with. It is downloaded, never kept.
reference: $(reference)/.unpacked

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0] + "; say PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.server: $(VENV)/bin/python pyproject.toml
	$(bin)/python -m pip install --quiet --editable '.[server]'
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(bin)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/bin/python pyproject.toml
	$(bin)/python -m pip install --quiet --editable '.[server,test,lint]'
	@touch $@

$(reference)/.unpacked: $(VENV)/bin/python
	@mkdir -p $(reference)
	$(bin)/python -m pip download --quiet --no-deps --dest $(reference) vllm-omni==$(REFERENCE_VERSION)
	$(bin)/python -m zipfile -e $(reference)/vllm_omni-$(REFERENCE_VERSION)-*.whl $(reference)
	@touch $@

$(engine)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "test-engine needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; say PYTHON=...")'
	$(PYTHON) -m venv $(engine)

$(engine)/.packages: $(engine)/bin/python tests/vllm_omni_patch/requirements.txt pyproject.toml
	$(engine)/bin/python -m pip install --quiet --no-compile --no-deps --requirement tests/vllm_omni_patch/requirements.txt
	$(engine)/bin/python -m pip install --quiet --editable .
	@touch $@

# Without their requirements, of which some have no use without a GPU and some pin one torch for each version.
$(engine)/%/.installed: | $(engine)/bin/python
	$(engine)/bin/python -m pip install --quiet --no-compile --no-deps --upgrade --target $(engine)/$* vllm==$* vllm-omni==$*
	@touch $@

clean:
	rm -rf $(VENV) .cache build dist demo-output
