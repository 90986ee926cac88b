# make demo    the whole workflow on 700 real PBMC, from nothing but Python and pip
# make test    every test
# make check   format, types, lint, generated files, figures and checks of the source tree
# make matrix  tests under other versions of Python and torch; MATRIX="3.12:2.15" chooses, which needs 7 GB each
# make docs    the documentation as a site, in site/
# PYTHON=…     the Python that .venv is made with, if not python3

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# 2 workers: most tests wait for small processes they start, each with one thread
PYTEST_ARGS ?= -n 2 --dist loadgroup

.PHONY: demo test check matrix docs install

demo: install
	$(BIN)/snakemake --profile profiles/local
	@echo
	@echo "The report: $(CURDIR)/results/report/index.html"

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint
	$(BIN)/python -m cellmill.config.document --check
	$(BIN)/python tools/house.py

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
