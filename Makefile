# Every target does the set-up that it needs; the second time is quick.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
TRAINS := $(VENV)/.trains
WRITES := $(VENV)/.writes
PEERS := $(VENV)/peers
STAMP := $(VENV)/.installed
TESTS := $(RUN) -m pytest
# The many processes of the tests read compiled modules, as those of a user do.
unexport PYTHONDONTWRITEBYTECODE
# Two processes for two cores: the ranks of a training are processes too.
BESIDE := --numprocesses 2 --dist loadgroup --no-loadscope-reorder

.PHONY: train test test-full fuzz chaos lint docs benchmarks bench gpu cluster cluster-down clean

train: $(TRAINS)  ## the reference transformer over two simulated nodes
	$(RUN) -m hpc_parallel.run strategy=pipeline nodes=2 launcher=local

test: $(STAMP)  ## every feature once, with a real Slurm where this machine can have one
	@$(RUN) tests/slurm/cluster.py install || echo "make test leaves out the tests that need a real Slurm."
	@$(RUN) tests/report/browser.py install || echo "make test leaves out the tests that open a report."
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(TESTS) -m "not full and not chaos_slow and not timing" $(BESIDE)
	$(TESTS) -m "timing and not full"
	@echo "Left out: make test-full (more axes, float32, longer trainings), make chaos, make fuzz."

test-full: $(STAMP)  ## what make test leaves out: more axes, float32, longer trainings
	@$(RUN) tests/slurm/cluster.py install || echo "make test-full leaves out the tests that need a real Slurm."
	$(TESTS) -m "full and not timing" $(BESIDE)
	$(TESTS) -m "full and timing"

fuzz: $(STAMP)  ## 20,000 damaged folders through the commands that look; FUZZ_SEED=... repeats a search
	FUZZ_CASES=20000 $(RUN) -m pytest -s tests/security/test_fuzz.py

chaos: $(STAMP)  ## trainings on a real Slurm, each harmed in its own way; ends with a table
	$(RUN) tests/slurm/cluster.py install
	$(RUN) -m pytest tests/slurm -m chaos

lint: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache

docs: $(WRITES)  ## the pages of docs/ as a site in site/, the generated ones written anew
	$(RUN) docs/generate.py
	$(RUN) docs/diagrams.py
	$(RUN) -m mkdocs build --strict

benchmarks: $(STAMP)  ## figures for docs/performance.md; needs an otherwise idle machine
	for script in tests/benchmarks/*.py; do $(RUN) $$script || exit 1; done

bench: $(PEERS)  ## ours beside its peers, as ratios, and bench.json; needs an otherwise idle machine
	$(RUN) -m tests.benchmarks.peers

gpu:  ## on a machine with an NVIDIA GPU: what only one shows, in 8 minutes, offline; gpu.json and gpu.md
	$(if $(wildcard $(RUN)),$(RUN),$(PYTHON)) -m tests.gpu.report

cluster: $(STAMP)  ## the four-host Slurm of the tests, to try things by hand
	$(RUN) tests/slurm/cluster.py install
	$(RUN) tests/slurm/cluster.py up

cluster-down:
	$(RUN) tests/slurm/cluster.py down

# What training needs. torch first and by the exact version of constraints.txt: whatever build of it pip has
# here decides.
$(TRAINS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt torch setuptools
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable .
	touch $@

# And what the tests need: transformers, wandb, optuna and others.
$(STAMP): $(TRAINS)
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $@

# The peers of `make bench`, beside the packages of the tests and never among them.
$(PEERS): $(STAMP) tests/benchmarks/peers/requirements.txt
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(PEERS) -r tests/benchmarks/peers/requirements.txt
	touch $@

# And what the pages of docs/ need.
$(WRITES): $(TRAINS)
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build site dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
