# `make demo` and `make test` need Python 3.11 or newer and nothing else: each makes .venv and installs into it.
# PYTHON: the interpreter the environment is made with. TORCH: which torch to install, such as torch==2.13.0.
PYTHON ?= python3
TORCH ?= torch>=2.9
VENV := .venv
BIN := $(VENV)/bin
TYPECHECK := .typecheck
# Two test processes of one thread each; JOBS=4 on a larger machine.
JOBS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

.PHONY: demo test kill-test lint fuzz install clean

demo: install
	$(BIN)/dflash demo --out demo

test: install lint
	$(PYTEST) --dist loadfile

fuzz: install
	DFLASH_FUZZ=full $(PYTEST) tests/store/test_damage.py tests/store/test_fuzz.py

kill-test: install
	$(BIN)/python -m pytest -q tests/extract/test_kills.py --kills 20

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(TYPECHECK) && ln -sfn .. $(TYPECHECK)/dflash_pipeline
	$(BIN)/mypy

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@echo "Making $(VENV) with $(PYTHON) and installing the package and its tools (a few minutes, mostly torch)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(TYPECHECK) demo build *.egg-info
