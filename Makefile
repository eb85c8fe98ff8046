# Every target works from a fresh clone with nothing but Python 3.11 or later: it makes .venv and installs what is pinned.
# Another interpreter: make test PYTHON=python3.12. Arguments for the scripts: make bench ARGS="--repeats 3".

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
PEERS := .venv/.peers

.PHONY: demo test bench bench-measures lint format
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/python examples/01_digits.py $(ARGS)
	$(BIN)/python examples/11_study.py

# Two workers with one thread each: more threads than cores slow both down.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

bench: $(PEERS)
	$(BIN)/python benchmarks/curvature.py $(ARGS)

bench-measures: $(PEERS)
	$(BIN)/python benchmarks/measures.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	set -e; for script in papers/*/run.py; do $(BIN)/mypy $$script; done

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

# Without their dependencies: they ask for torchvision, which the benchmark does not need (see benchmarks/peers.txt).
$(PEERS): $(INSTALLED) benchmarks/peers.txt
	$(BIN)/python -m pip install --no-deps -c constraints.txt -r benchmarks/peers.txt
	touch $@
