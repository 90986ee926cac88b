# make demo      the whole workflow on 700 real PBMC, from nothing but Python and pip
# make showcase  models of three sizes on 6,486 cells that packages ship, scVI beside them, and few labels
# make check     format, types, lint, generated files, figures and checks of the source tree: 2 minutes
# make test      every promise once: 15 minutes on 2 cores
# make test-all  every test, with the packages of all extras
# make bench     ratios of CPU time against benchmarks/budget.toml: 3 minutes
# make scale     a million cells from gzipped counts to the report, and how each stage grows: 90 minutes, 20 GB of disk;
#                FOLDER=/var/tmp is where, SCALE="--cells 10000 100000 --files 1 8" the sizes
# make matrix    demo, every stage and tests with the oldest and the newest versions that pyproject.toml allows;
#                make newest: demo, every stage and bridges with the newest; BRIDGES= leaves the bridges out
# make wheelhouse PYTHON_VERSION=3.12 PLATFORM=manylinux_2_28_x86_64 WITHOUT="torch numpy" SET=gpu
#                wheels for a machine without a package index, in wheelhouse/ (TO=…): SET is all, run, shards or gpu,
#                WITHOUT names what that machine has
# make install WHEELHOUSE=…   there, from these wheels alone
# make docs      the documentation as a site, in site/
# PYTHON=…       the Python that .venv is made with, if not python3

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# 4 workers for 2 cores: the tests on a real SLURM, all in one worker, mostly wait; byte code, or each of the hundreds of
# processes that tests start would compile the source anew
PYTEST_ARGS ?= -n 4 --dist loadgroup --no-loadscope-reorder
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 $(PYTEST_ARGS)
EXTRAS := $(patsubst %,--requirement envs/requirements-%.lock,hf inputs track docs evaluate onnx s3)

# pip's source: the lock from the index, or a wheelhouse alone
WHEELHOUSE ?=
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check $(if $(WHEELHOUSE),--no-index --no-deps --find-links "$(WHEELHOUSE)")
REQUIREMENTS := $(if $(WHEELHOUSE),$(WHEELHOUSE)/requirements.txt,envs/requirements.lock)
PYTHON_VERSION ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PLATFORM ?= manylinux_2_28_x86_64
SET ?= all
TO ?= wheelhouse

BRIDGES ?= --bridges
FOLDER ?= /var/tmp
SCALE ?=

.PHONY: demo showcase check test test-all extras bench scale matrix newest docs wheelhouse install

demo: install
	$(BIN)/snakemake --profile profiles/local
	@echo
	@echo "The report: $(CURDIR)/results/report/index.html"

SHOWCASE := results/report/index.html results/runs/size-hidden128/knock_out/pbmc3k.h5ad

showcase: install .scvi/installed
	$(BIN)/python -W ignore tools/showcase_cells.py data/showcase
	$(BIN)/snakemake --profile profiles/local --configfile config/examples/showcase.yaml --replace-workflow-config $(SHOWCASE)
	@echo
	@echo "The report: $(CURDIR)/results/report/index.html"

# packages that .venv has, torch above all, are read from there
.scvi/installed: $(STAMP)
	$(PYTHON) -m venv .scvi
	$(call LINK_PACKAGES,$(BIN)/python,.scvi/bin/python)
	.scvi/bin/pip install --quiet --disable-pip-version-check scvi-tools==1.4.2
	touch $@

test: install
	$(PYTEST) -m "not full"

test-all: extras
	$(PYTEST)

extras: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(EXTRAS)

check: install
	$(eval START := $(shell date +%s))
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint
	$(BIN)/python tools/option_docs.py --check
	$(BIN)/python -m tools.house
	@echo "make check: $$(($$(date +%s) - $(START))) s"

bench: install
	$(BIN)/python benchmarks/budget.py

scale: install
	$(BIN)/python benchmarks/scale.py --folder "$(FOLDER)" $(SCALE)

matrix: install
	$(BIN)/python tools/matrix.py $(BRIDGES)

newest: install
	$(BIN)/python tools/matrix.py newest --stages $(BRIDGES) --constraint $(filter torch==%,$(file < envs/requirements.lock))

docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --requirement envs/requirements-docs.lock
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The documentation: $(CURDIR)/site/index.html"

wheelhouse: install
	$(BIN)/python tools/wheelhouse.py "$(TO)" --python $(PYTHON_VERSION) --platform $(PLATFORM) --set $(SET) --without $(WITHOUT)

install: $(STAMP)

# without torch in the wheelhouse: .venv sees PYTHON's own packages too, also where PYTHON is of a virtual environment
SITE := $(if $(WHEELHOUSE),$(if $(wildcard $(WHEELHOUSE)/torch-*.whl),,yes))
define LINK_PACKAGES
$(1) -c 'import site; print(*site.getsitepackages(), sep="\n")' \
	    > "$$($(2) -c 'import site; print(site.getsitepackages()[0])')/packages.pth"
endef

define LINK_SITE
$(call LINK_PACKAGES,$(PYTHON),$(BIN)/python)
@$(BIN)/python -c 'import importlib.util, sys; importlib.util.find_spec("torch") or sys.exit("$(PYTHON) and $(WHEELHOUSE) have no torch: set PYTHON to a Python that has it")'
endef

$(STAMP): envs/requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("cellmill needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) has no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(if $(SITE),$(LINK_SITE))
	$(PIP_INSTALL) --requirement "$(REQUIREMENTS)"
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $(STAMP)
