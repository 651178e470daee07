# The README's two commands are `make demo` and `make test`; both need only Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OUT    ?= demo
# Only pip installs torch: it also looks where a CPU build may lie (PIP_FIND_LINKS). The one of PyPI brings CUDA on Linux.
TORCH  ?= torch==2.13.0
START  := $(shell date +%s)
ALL    := $(VENV)/.all
COMPILE := $(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
    --python-version 3.11

# Compiled modules are kept: without them every command compiles what it imports, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test test-room test-all test-browser test-documents test-long package lint docs notebooks bench lock clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(READY)  ## make the environment in .venv, from the pinned versions

# uv installs in a fifth of the time; where it cannot reach an index that pip is configured for, pip does it.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) 2>/dev/null || \
    $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(1)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "coterie needs Python 3.11 or newer: make PYTHON=python3.12 env")'
	@echo "Making the environment in $(VENV) (less than a minute) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^uv==' requirements.lock)
	@$(call INSTALL,-r requirements.lock)
	@$(call INSTALL,--no-deps -e .)
	@touch $@

$(ALL): $(READY) requirements-all.lock
	@echo "Adding Flower, Playwright, Jupyter and torch to $(VENV) (about a minute) ..."
	@$(call INSTALL,-r requirements-all.lock)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH)
	@touch $@

demo: $(READY)  ## the paper's data, solved and certified, with a picture
	@$(BIN)/coterie demo --out $(OUT)

test: lint  ## lint and the quick tests: less than five minutes with the install
	@$(BIN)/python -m pytest -m "not slow and not flower and not browser" -n 2 --dist worksteal
	@echo "Took $$(($$(date +%s) - $(START))) s. Left to 'make test-all': $$(cat .pytest_cache/v/coterie/left-out) slow tests, tests on Flower and in a browser, the notebooks and the docs build."

test-room: $(READY)  ## the quick tests of one room, for example: make test-room R=losses
	@$(BIN)/python -m pytest -m "not slow and not flower and not browser" -n 2 --dist worksteal tests/$(R)

test-all: $(ALL)  ## what `make test` leaves out: slow tests, a browser (Debian's chromium), Flower, notebooks, docs, the package
	@$(BIN)/python -m pytest -m "slow and not flower and not browser" -n 2 --dist worksteal
	@$(BIN)/python -m pytest -m "flower and not long" -n 2 --dist loadgroup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-browser test-documents

# Each of these two uses one core most of the time.
test-browser: $(ALL)
	@$(BIN)/python -m pytest -m "browser and not flower" -n 0

test-documents: $(ALL)
	@$(BIN)/python docs/notebooks.py --check
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory package

test-long: $(ALL)  ## what `make test-all` leaves out: kills and faults over the wire on Flower, a thousand users
	@$(BIN)/python -m pytest -m long -n 0

# The wheel is built from the sdist, and installed alone, without extras, by $(PYTHON), which may be another version.
package: $(READY)  ## build sdist and wheel into dist/, and run the wheel alone in an empty environment
	@rm -rf dist && mkdir dist
	@$(BIN)/python -m build --outdir dist . >dist/build.log 2>&1 || (cat dist/build.log; exit 1)
	@$(PYTHON) -m venv dist/env
	@$(BIN)/uv pip install --quiet --python dist/env/bin/python dist/*.whl 2>/dev/null || \
	    dist/env/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	@cd dist && env/bin/python ../tests/support/wheel_alone.py

lint: $(READY)  ## ruff, mypy, and oxlint for the page's scripts
	@$(BIN)/ruff check --quiet .
	@$(BIN)/oxlint --format unix --deny-warnings src/coterie/output/report
	@$(BIN)/mypy --no-error-summary

docs: $(READY)  ## build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(ALL)  ## run the notebooks of the documentation, store what they show and draw the gallery
	@$(BIN)/python docs/notebooks.py
	@$(BIN)/python docs/gallery.py

bench: $(READY)  ## run the benchmarks, alone on the machine
	@for script in startup losses loading solvers fit; do $(BIN)/python benchmarks/$$script.py || exit 1; done

lock: $(READY)  ## pin the newest versions that fit pyproject.toml, with Flower and Playwright and without
	@$(COMPILE) --upgrade --extra dev --extra flower-sim --extra metrics --extra browser --extra notebooks pyproject.toml -o requirements-all.lock
	@$(COMPILE) --upgrade --extra dev --constraint requirements-all.lock pyproject.toml -o requirements.lock

clean:  ## remove what was made
	rm -rf $(VENV) site demo dist .mypy_cache .pytest_cache .ruff_cache
