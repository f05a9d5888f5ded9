# Two commands on a fresh machine: `make demo` and `make test`. Each builds .venv first, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check
HOUSE  := $(wildcard src tests benchmarks examples)

.PHONY: help demo test parity check bench bench-optimality docs clean clean-venv
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s%s\n", $$1, $$2}' Makefile

demo: $(STAMP)  ## plan, split, check and train real models over two processes; at most 3 minutes
	$(BIN)/outsize demo

# A file stays in one process, which shares its fixtures and captures; one thread each, for libgomp's would spin.
test: $(STAMP)  ## all tests, a process per core; at most 15 minutes on two
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

parity: $(STAMP)  ## all models, cuts, schedules, microbatches; 20 minutes, writes docs/parity.md, coverage.md
	$(BIN)/python -m pytest tests/parity/test_one_process.py tests/parity/test_coverage.py --all --update-golden

check: $(STAMP)  ## style, types, floors, house rules
	$(BIN)/ruff check $(HOUSE)
	$(BIN)/ruff format --check $(HOUSE)
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest tests/house

bench: $(STAMP)  ## every question of benchmarks/; those that want data of their own (they end with 2) are passed over
	@for question in $(wildcard benchmarks/*/run.py); do \
	    echo "$$question"; $(BIN)/python "$$question" || [ $$? -eq 2 ] || exit 1; \
	done

bench-optimality: $(STAMP)  ## the planner against all splits of 10,000 small graphs; PROFILES=DIR adds real ones
	$(BIN)/python benchmarks/optimality/brute_force.py --graphs 10000
	$(if $(PROFILES),$(BIN)/python benchmarks/optimality/run.py --profiles $(PROFILES))

docs: $(STAMP)  ## write golden files anew; read the diff before you commit it
	$(BIN)/python -m pytest tests/golden tests/house --update-golden
	@git --no-pager diff --stat -- docs tests/golden

clean:  ## remove what a run leaves behind; .venv stays
	rm -rf build dist demo-out .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(HOUSE) -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv:  ## remove .venv; the next make builds it again
	rm -rf $(VENV)

# torchvision comes without its dependencies: it must not exchange the pinned torch for another build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "outsize needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	         "Next: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into $(VENV), once: a minute or a few."
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) cannot build a venv. Next: install your system's python3-venv package."; exit 1; }
	@$(PIP) install -c constraints.txt -e '.[hf,plot,test,dev]'
	@$(PIP) install -c constraints.txt pillow
	@$(PIP) install -c constraints.txt --no-deps torchvision
	@touch $@
