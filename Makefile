# Each target makes .venv when it is missing or out of date; PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test test-long lint format clean

quickstart: $(VENV)/.installed
	$(BIN)/dovetail quickstart

test: $(VENV)/.installed
	$(BIN)/pytest -n $(JOBS) --dist worksteal

test-long: $(VENV)/.installed
	$(BIN)/pytest -m long --timeout 3600

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=typecheck $(BIN)/mypy -p dovetail

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Dovetail needs Python 3.11 or newer; set PYTHON")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.[bench,dev]'
	touch $@
