# Each target makes .venv when it is missing or out of date; PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# what `make test-long` runs once per target of this CPU
EACH_TARGET := tests/codegen/kernels tests/test_fidelity.py tests/compiler/test_pipeline.py
# modules are compiled when they are imported: most never are, and all together take a minute
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# the wheel of a C compiler, where there is none
ZIG := $(if $(shell command -v gcc || command -v clang),,[zig])

# what a wheel carries, so that no C compiler is needed where it is installed
WHEEL_TARGETS ?= x86-64-amx x86-64-avx512bf16 x86-64-avx512vnni x86-64-avx512 x86-64-avxvnni x86-64-avx2

# modules are compiled once, not in each of the many processes that tests start
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart kernels wheel docs test test-long gpu-report lint format clean

quickstart: $(VENV)/.base
	$(BIN)/dovetail quickstart

# all kernels that models share, for this machine; else each is built when it is first needed
kernels: $(VENV)/.base
	$(BIN)/python -m dovetail.compiler.rules.shared_kernels

wheel: $(VENV)/.installed
	$(BIN)/python -m dovetail.compiler.rules.shared_kernels --package $(WHEEL_TARGETS)
	$(BIN)/python -m build --wheel -C--build-option=--plat-name=linux_x86_64
	rm -rf ir/libraries

# the documentation as a site: open build/site/index.html
docs: $(VENV)/.installed
	$(BIN)/mkdocs build --strict --quiet

test: $(VENV)/.installed
	$(BIN)/pytest -n $(JOBS) --dist worksteal

test-long: $(VENV)/.installed
	$(BIN)/pytest -m long --timeout 3600
	for target in $$($(BIN)/python -c 'from tests.hosts import host_targets; \
	    print(*(t.name for t in host_targets() if t.machine))'); do \
	  DOVETAIL_TARGET=$$target $(BIN)/pytest -n $(JOBS) $(EACH_TARGET) || exit 1; \
	done

# what an accelerator does here, in ten minutes; DEVICE=cuda:1 picks one, torch:cpu tries the script out
gpu-report: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu_report.py --output gpu-report $(if $(DEVICE),--device $(DEVICE))

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=typecheck $(BIN)/mypy -p dovetail

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Dovetail needs Python 3.11 or newer; set PYTHON")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.$(ZIG)'
	touch $@

$(VENV)/.installed: $(VENV)/.base
	$(PIP) -c constraints.txt -e '.[bench,dev,docs]'
	touch $@
