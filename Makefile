# Every target does the set-up that it needs; the second time is quick.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
TRAINS := $(VENV)/.trains
WRITES := $(VENV)/.writes
PEERS := $(VENV)/peers
FRAMEWORKS := $(VENV)/.frameworks
STAMP := $(VENV)/.installed
TESTS := $(RUN) -m pytest
# The many processes of the tests read compiled modules, as those of a user do.
unexport PYTHONDONTWRITEBYTECODE
# Failures of tests that start processes are tried once more at the end, alone, before a target is red.
AGAIN := --last-failed --last-failed-no-failures=none --again
# DURATIONS=0 lists what each test takes.
DURATIONS ?= 30
define STYLE
$(RUN) -m ruff check .
$(RUN) -m ruff format --check .
$(RUN) -m mypy
$(VENV)/bin/lint-imports --no-cache
endef
# Only these modules are imported to find the tests that compare seconds.
TIMED = $$(grep -rl --include='test_*.py' 'mark\.timing' tests)
# Two processes for two cores: the ranks of a training are processes too. Three were not faster.
BESIDE := --numprocesses 2 --dist loadgroup --no-loadscope-reorder

.PHONY: help train test check affected one test-full fuzz chaos lint docs benchmarks bench gpu cluster \
  cluster-down clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(TRAINS)  ## the reference transformer over two simulated nodes
	$(RUN) -m hpc_parallel.run strategy=pipeline nodes=2 launcher=local
	@echo "To use this environment in your shell: source $(VENV)/bin/activate"

test: $(STAMP)  ## every feature once, with a real Slurm where this machine can have one; what CI runs
	@$(RUN) tests/slurm/cluster.py install || echo "make test leaves out the tests that need a real Slurm."
	@$(RUN) tests/report/browser.py install || echo "make test leaves out the tests that open a report."
	$(STYLE)
	-$(TESTS) --cache-clear --durations=$(DURATIONS) -m "not full and not chaos_slow and not timing" $(BESIDE)
	-$(TESTS) -m "timing and not full" $(TIMED)
	@echo "Left out: make test-full (more axes, float32, longer trainings), make chaos, make fuzz."
	$(TESTS) $(AGAIN)=2 --target=test -m "not full and not chaos_slow"

check: $(STAMP)  ## style, types, contracts, and the unit tests that start no process: two minutes
	$(STYLE)
	$(TESTS) --cache-clear --target=check tests/unit -m "not full and not timing and not processes" $(BESIDE)

affected: $(STAMP)  ## the tests that a change since main can reach by imports, nearest first; none of Slurm
	$(TESTS) --cache-clear --target=affected --affected=main -m "not full and not timing and not slurm" $(BESIDE)

one: $(STAMP)  ## one file or test, in one process with its output: make one T=tests/unit/test_layout.py
	$(TESTS) -s --override-ini=addopts= $(T)

test-full: $(FRAMEWORKS)  ## what make test leaves out: more axes, float32, longer trainings
	@$(RUN) tests/slurm/cluster.py install || echo "make test-full leaves out the tests that need a real Slurm."
	$(TESTS) --cache-clear -m "full and not timing" $(BESIDE); beside=$$?; \
	$(TESTS) --target=test-full -m "full and timing" && exit $$beside

fuzz: $(STAMP)  ## 20,000 damaged folders through the commands that look; FUZZ_SEED=... repeats a search
	FUZZ_CASES=20000 $(TESTS) --cache-clear --target=fuzz -s tests/security/test_fuzz.py

chaos: $(STAMP)  ## trainings on a real Slurm, each harmed in its own way; SEED=n repeats one, FULL=1 has all
	$(RUN) tests/slurm/cluster.py install
	seed=$${SEED:-$${CHAOS_SEED:-$$(date +%s)}}; CHAOS_SEED=$$seed CHAOS_FULL=$(FULL) \
	$(TESTS) --cache-clear --target=chaos tests/slurm -m chaos

lint: $(STAMP)  ## style as it should be, types, contracts
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(STYLE)

docs: $(WRITES)  ## the pages of docs/ as a site in site/, the generated ones written anew
	$(RUN) docs/generate.py
	$(RUN) docs/diagrams.py
	$(RUN) -m mkdocs build --strict

benchmarks: $(STAMP)  ## figures for docs/performance.md; needs an otherwise idle machine
	for script in $$(grep -L required=True tests/benchmarks/*.py | grep -v planted); do $(RUN) $$script || exit 1; done

bench: $(PEERS)  ## ours beside its peers, as ratios, and bench.json; needs an otherwise idle machine
	$(RUN) -m tests.benchmarks.peers

gpu:  ## on a machine with an NVIDIA GPU: what only one shows, in 8 minutes, offline; gpu.json and gpu.md
	$(if $(wildcard $(RUN)),$(RUN),$(PYTHON)) -m tests.gpu.report

cluster: $(STAMP)  ## the four-host Slurm of the tests, to try things by hand
	$(RUN) tests/slurm/cluster.py install
	$(RUN) tests/slurm/cluster.py up

cluster-down:  ## stop it
	$(RUN) tests/slurm/cluster.py down

# What training and the plots of reports need. torch first and by the exact version of constraints.txt: whatever
# build of it pip has here decides.
$(TRAINS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt torch setuptools
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[report]"
	touch $@

# And what the tests need: transformers, wandb, optuna and others.
$(STAMP): $(TRAINS)
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $@

# And the frameworks of the scripts that only make test-full starts: accelerate, lightning, deepspeed.
$(FRAMEWORKS): $(STAMP)
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[scripts]"
	touch $@

# The peers of `make bench`, beside the packages of the tests and never among them.
$(PEERS): $(STAMP) tests/benchmarks/peers/requirements.txt
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(PEERS) -r tests/benchmarks/peers/requirements.txt
	touch $@

# And what the pages of docs/ need.
$(WRITES): $(TRAINS)
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[docs]"
	touch $@

clean:  ## remove what was installed and built
	rm -rf $(VENV) build site dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
