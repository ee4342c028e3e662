# Two commands matter: `make demo` and `make test`. Both work from a fresh clone: they find a
# Python 3.12 or newer, build .venv and install into it. A second call installs nothing.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Several ranks share the cores: one compute thread a process.
export OMP_NUM_THREADS := 1

.PHONY: help setup demo test sweep test-all lint golden docs bench clean

help:
	@echo "make setup     build .venv with mfsdp in it"
	@echo "make demo      plan, validate, train and compare a small DeepSeek-V3 proxy"
	@echo "make test      linter, type checker and tests"
	@echo "make sweep     the long sweeps (every layout against one rank)"
	@echo "make test-all  make test, then make sweep"
	@echo "make golden    rewrite golden files and snapshots"
	@echo "make docs      rewrite the generated pages"
	@echo "make bench     benchmarks, side by side, as ratios"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/find_python.sh
	@python=$$(sh scripts/find_python.sh) || exit 1; \
	test -x $(BIN)/python || { echo "creating $(VENV) with $$python"; "$$python" -m venv $(VENV); }
	@echo "installing mfsdp and its dependencies into $(VENV) (about 5 GB, once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

demo: setup
	@sh scripts/demo.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

sweep: setup
	$(BIN)/python -m pytest -m sweep

test-all: test sweep

golden: setup
	MFSDP_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -m "not sweep" -k "golden or snapshot"

docs: setup
	$(BIN)/python scripts/make_cli_reference.py
	$(BIN)/python scripts/make_rules_page.py

bench: setup
	@for bench in tests/bench/bench_*.py; do $(BIN)/python $$bench; done

clean:
	rm -rf $(VENV) runs build dist *.egg-info
