# make demo      the whole workflow on 700 real PBMC, from nothing but Python and pip
# make check     format, types, lint, generated files, figures and checks of the source tree: 2 minutes
# make test      every promise once: 15 minutes on 2 cores
# make test-all  every test, with the packages of all extras: 50 minutes
# make matrix    tests under other versions of Python and torch; MATRIX="3.12:2.15" chooses, which needs 7 GB each
# make docs      the documentation as a site, in site/
# PYTHON=…       the Python that .venv is made with, if not python3

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# 3 workers for 2 cores: the tests on a real SLURM, all in one worker, mostly wait
PYTEST_ARGS ?= -n 3 --dist loadgroup
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 $(PYTEST_ARGS)
EXTRAS := $(patsubst %,--requirement envs/requirements-%.lock,hf inputs track docs evaluate onnx s3)

.PHONY: demo check test test-all extras matrix docs install

demo: install
	$(BIN)/snakemake --profile profiles/local
	@echo
	@echo "The report: $(CURDIR)/results/report/index.html"

test: install
	$(PYTEST) -m "not full"

test-all: extras
	$(PYTEST)

extras: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(EXTRAS)

check: START := $(shell date +%s)
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint
	$(BIN)/python -m cellmill.config.document --check
	$(BIN)/python tools/house.py
	@echo "make check: $$(($$(date +%s) - $(START))) s"

matrix: install
	$(BIN)/python tools/matrix.py $(MATRIX)

docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --requirement envs/requirements-docs.lock
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The documentation: $(CURDIR)/site/index.html"

install: $(STAMP)

$(STAMP): envs/requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("cellmill needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) has no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement envs/requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)
