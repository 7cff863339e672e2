# memlab: every target starts from a bare machine with Python 3.11+, make and git.
#
#   make course   set up, run all chapters -> build/course/index.html
#   make test     set up, lint, types, tests
#   make stress   the grader under load: hostile class, kills, many submissions, fuzzing; long tests (hours)
#   make lab      set up, open JupyterLab on the student notebooks
#   make browser  everything that people open, in a headless Chromium: JupyterLab, explorers, viewer, site (minutes)
#   make site     the site of the executed chapters, with reference and calculator -> build/site/index.html
#   make setup    the environment alone, in .venv
#   make pins     all chapters with Colab's versions and from Binder's files in 2 GB; Python 3.12 and 3.13
#   make release  generate notebooks/ from solutions/
#   make clean    remove .venv and build
#
# On a Linux machine without a GPU, PyPI's torch is a CUDA build of 2.7 GB. To take the CPU wheel:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt
JOBS ?= 2
BIN := .venv/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: course test stress lab browser site setup release clean pins

course: setup
	$(BIN)/autograder run --out build/course --jobs $(JOBS)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/autograder release --check
	$(BIN)/python -m pytest -n $(JOBS)

stress: setup
	nice $(BIN)/python -m pytest -s tests/stress/fuzz_doctor.py tests/stress/hostile_class.py tests/stress/killed.py tests/stress/many.py
	nice $(BIN)/python -m pytest -m long tests/memlab

lab: setup
	$(BIN)/python -m autograder.lab

browser: setup
	$(BIN)/python -m pytest -s -v -m browser

site: .venv/site-ready
	$(BIN)/autograder run --out build/course --jobs $(JOBS)
	$(BIN)/python -m docs.site --out build/site
	$(BIN)/python -m pytest -m site tests/site

pins: setup
	TORCH_INDEX=$(TORCH_INDEX) nice $(BIN)/python -m pytest -s -m long tests/pins

release: setup
	$(BIN)/autograder release

setup: .venv/ready

.venv/ready: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "memlab needs Python 3.11 or newer: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv \
	  || { echo "no venv module: install your system's python3-venv package"; exit 1; }
	@echo "installing torch, then the rest, into .venv (about a minute and 1.7 GB)"
	@$(BIN)/python -c 'import torch' 2>/dev/null \
	  || $(PIP) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(PIP) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) --editable '.[dev]'
	@touch $@

.venv/site-ready: .venv/ready
	@$(PIP) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) --editable '.[dev,site]'
	@touch $@

clean:
	rm -rf .venv build
