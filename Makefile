# Every target works from a fresh clone with nothing but Python 3.11 or later: it makes .venv and installs what is pinned.
# Another interpreter: make test PYTHON=python3.12. Arguments for the scripts: make bench ARGS="--repeats 3".

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
FLOORS := .venv-floors
LENIENT := $(addprefix -W ignore::,DeprecationWarning FutureWarning ResourceWarning pytest.PytestUnraisableExceptionWarning)
INSTALLED := .venv/.installed
PEERS := .venv/.peers
# Quick tests of every package, beside the doctests of all of them.
SMOKE := saltflat tests/results/test_report.py tests/gradients tests/layers tests/engine/test_losses.py \
	tests/engine/test_session.py tests/balance/test_balance.py tests/symmetry/test_fold.py tests/measures/test_catalog.py \
	tests/audit tests/training/test_shift.py tests/integrations/test_loggers.py tests/integrations/test_stability.py \
	tests/datasets/test_datasets.py tests/studies/test_study_grid.py tests/studies/test_networks.py \
	tests/render/test_symmetry_view.py tests/project/test_docs.py

.PHONY: demo docs check test test-floors bench bench-measures lint style types smoke format
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/python examples/01_digits.py $(ARGS)
	$(BIN)/python examples/11_study.py
	$(BIN)/python examples/14_certificate.py $(ARGS)

# The documentation site, in docs/_build/html. Warnings are errors.
docs: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python docs/site/build.py $(ARGS)

# Before a commit: mypy on one core, quick tests on the other.
check: style
	$(MAKE) --no-print-directory -j2 types smoke

# Two workers with one thread each: more threads than cores slow both down.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

# The oldest versions that pyproject.toml allows. Takes 6 GB: no older torch comes without CUDA.
# Old libraries warn of their own dependencies and leave files open: no errors here. Another Python: make test-floors PYTHON=python3.12.
test-floors: $(FLOORS)/.installed
	OMP_NUM_THREADS=1 $(FLOORS)/bin/python -m pytest -n 2 $(LENIENT) $(ARGS)

bench: $(PEERS)
	$(BIN)/python benchmarks/curvature.py $(ARGS)

bench-measures: $(PEERS)
	$(BIN)/python benchmarks/measures.py $(ARGS)

lint: style types
	set -e; for paper in papers/*/run.py; do $(BIN)/mypy $$(dirname $$paper)/*.py; done
	$(BIN)/mypy papers/*.py

style: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

smoke: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(SMOKE) $(ARGS)

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev,docs]"
	touch $@

$(FLOORS)/.installed: pyproject.toml constraints.txt tests/floors.py
	$(PYTHON) -m venv $(FLOORS)
	$(FLOORS)/bin/python tests/floors.py > $(FLOORS)/floors.txt
	$(FLOORS)/bin/python -m pip install -c $(FLOORS)/floors.txt -e ".[demo,frames,lightning,hf,loggers,ray]" \
		$$(grep -E '^(hypothesis|pytest|pytest-xdist)==' constraints.txt)
	touch $@

# Without their dependencies: they ask for torchvision, which the benchmark does not need (see benchmarks/peers.txt).
$(PEERS): $(INSTALLED) benchmarks/peers.txt
	$(BIN)/python -m pip install --no-deps -c constraints.txt -r benchmarks/peers.txt
	touch $@
