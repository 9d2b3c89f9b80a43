# Two commands for a newcomer: `make estimate` and `make test`. Everything lives in .venv inside the checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUDGET ?= 540
KERNELS_BUDGET ?= 300
MODEL ?= llama-7b --qlora --bs 4 --ctx 2048

# tests run the command hundreds of times, each of which would compile the package anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: estimate test browser browsers newcomers pythons lint types quick unit alone kernels install-test constraints docs notebooks page fuzz gpu gpu-kernels clean

estimate: $(VENV)/.light          ## install the light estimator and price a QLoRA step
	$(BIN)/estimate --model $(MODEL)
	@echo; echo "'. $(BIN)/activate' makes it 'estimate': try 'estimate plan --model llama-3.1-8b --gpu rtx4090', 'estimate serve --open', 'estimate --help'"

test: browser lint types quick unit alone kernels  ## install everything, then lint, type-check and test: what fails early comes first

browser:                          ## some tests need Chromium; NO_BROWSER=1 leaves them out, and says which
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	  [ -n "$(NO_BROWSER)" ] && echo "NO_BROWSER: the tests that need Chromium are left out; each run below counts them" || { \
	  echo "make test: Chromium is missing (Debian: apt-get install chromium); NO_BROWSER=1 leaves out the tests that need it" >&2; exit 2; }; }

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.light: $(VENV)/bin/python pyproject.toml $(shell find estimator -name '*.py' -o -name '*.json')
	$(BIN)/python -m pip install --quiet .
	touch $@

# torch is pinned: its CPU build installs in seconds, an unpinned torch brings gigabytes of CUDA packages
TORCH := torch==2.13.0
EXTRAS := .[profiler,kernels,plots,test,docs,dev]
# the hashes in constraints.txt are of wheels of this Python; elsewhere the extras' own ranges hold
CI_PYTHON := import platform as p; print(p.python_implementation(), *p.python_version_tuple()[:2], p.system(), p.machine())

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	if [ "$$($(BIN)/python -c '$(CI_PYTHON)')" = "CPython 3 11 Linux x86_64" ]; then \
	  $(BIN)/python -m pip install --quiet --no-deps --require-hashes -r constraints.txt && \
	  $(BIN)/python -m pip install --quiet $(TORCH) && \
	  $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e . && \
	  $(BIN)/python -m pip check --quiet; \
	else \
	  $(BIN)/python -m pip install --quiet $(TORCH) && $(BIN)/python -m pip install --quiet -e '$(EXTRAS)'; \
	fi
	touch $@

constraints: $(VENV)/bin/python   ## resolve everything anew and write the exact versions down
	mkdir -p build
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report build/resolved.json $(TORCH) -e '$(EXTRAS)'
	$(BIN)/python .ci/constraints.py < build/resolved.json > constraints.txt
	$(BIN)/python docs/generate_sbom.py

install-test: $(VENV)/.test

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/pyright
	$(BIN)/pyright -p .ci/basic_types.json

# one worker a core, eight at most; PYTEST_WORKERS=0 runs everything in one process; tests move to the worker that has none left
PYTEST_WORKERS ?= logical
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL := $(PYTEST) --numprocesses $(PYTEST_WORKERS) --maxprocesses 8 --dist worksteal

quick: $(VENV)/.test              ## under a minute: the tests that need no torch, up to the first failure
	$(PARALLEL) --lane quick --exitfirst

unit: $(VENV)/.test               ## the tests that the quick lane leaves out
	$(PARALLEL) --lane rest -m "not alone" --ignore=tests/kernels

alone: $(VENV)/.test              ## the tests that bring processes of their own, without any beside them
	$(PYTEST) -m alone --ignore=tests/kernels

kernels: $(VENV)/.test            ## apart: Triton's interpreter is chosen when triton is first imported
	$(PARALLEL) tests/kernels

# the site is made from the sources without importing them: no torch, no test tools
$(VENV)/.docs: $(VENV)/bin/python pyproject.toml
	[ -e $(VENV)/.test ] || $(BIN)/python -m pip install --quiet '.[docs]'
	touch $@

docs: $(VENV)/.docs               ## the documentation site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/.test          ## run the notebooks and write what they print and draw back into them
	$(BIN)/python notebooks/execute.py

page: $(VENV)/.light              ## the page as static files in build/page; npm brings the runtime
	$(BIN)/estimate page --out build/page

browsers: $(VENV)/.test           ## minutes: the page in real browsers, axe-core and Lighthouse; needs Chromium and npm
	$(BIN)/python benchmarks/browsers/run.py --out benchmarks/results/cpu/browsers.json

newcomers: $(VENV)/.test          ## minutes: five tasks in a fresh environment, from the README alone
	$(BIN)/python benchmarks/newcomers/newcomers.py --out benchmarks/results/cpu/newcomers.json

pythons: $(VENV)/.test            ## minutes: the light install and the quick tests under every Python from 3.10 on that is found
	$(BIN)/python benchmarks/newcomers/pythons.py --out benchmarks/results/cpu/pythons.json

fuzz: $(VENV)/.test               ## hours: seeded inputs at every door; goes on where it was stopped
	nice $(BIN)/python benchmarks/fuzz/run.py --count 500000 --json benchmarks/results/cpu/fuzz.json

OUT ?= benchmarks/results/new

gpu:                              ## nine minutes on a GPU into OUT=folder: ceilings, calibration, whole steps; ARCHIVE=x.tar.gz keeps it in one file too
	$(PYTHON) benchmarks/campaign/campaign.py --budget $(BUDGET) --out $(OUT) $(if $(ARCHIVE),--archive $(ARCHIVE))

gpu-kernels:                      ## five minutes more, into the same folder: every kernel beside its peers
	$(PYTHON) benchmarks/kernels/kernel_speed.py --budget $(KERNELS_BUDGET) --out $(OUT) $(if $(ARCHIVE),--archive $(ARCHIVE))
	$(PYTHON) benchmarks/campaign/report.py $(OUT) --no-trace

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
