# make quickstart   an agent learns to search, on this machine's CPU
# make test         the whole test suite
# make check        format, types and the nearest tests of a change, in 90 seconds
# make test-with-X  the test with a package that has an environment of its own, .venv-X:
#                   X is one of tests/packages/*.txt, such as inspect; tau2 needs
#                   TAU2_BENCH=FOLDER, a checkout of tau2-bench, besides
# make lint         format, lint and types
# make format       rewrite the code in its format
# make docs         the documentation as a site, in runs/site
# make wheel        the package as a wheel, in runs/wheel
# make clean        remove the environment
#
# PYTHON=...        the interpreter of the environment (default: 3.12, else 3.13 or 3.11)
# EXTRA=cuda|tpu    the JAX of a new environment (default: that of a CPU)
# WORKERS=3         of the tests, 2.5 to 3.5 GB each; some tests mostly wait
# SINCE=HEAD        the commit that `make check` compares with
# WORKDIR=...       where the quickstart writes (default: runs/quickstart)

VENV ?= .venv
WORKERS ?= 3
SECONDS ?= 45
SINCE ?= HEAD
WORKDIR ?= runs/quickstart

# A name on the PATH may be a shim of a version that is not installed: run each.
supported = import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(firstword $(foreach name,python3.12 python3.13 python3.11 python3 python,\
	$(shell $(name) -c "$(supported)" 2>/dev/null && echo $(name))))

.PHONY: quickstart test check lint format docs wheel clean same-extra
.PRECIOUS: $(VENV)-%/installed
.DEFAULT_GOAL := test

quickstart: $(VENV)/installed
	$(VENV)/bin/python -m experiments.miniwiki.search --workdir=$(WORKDIR)

# Workers and the programs that tests start read the same sources: compiled once is enough.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile \
		--no-loadscope-reorder $(ARGS)

# What one runs while working: format, types and the nearest tests of what differs from
# the last commit. Tests that have not begun after SECONDS are skipped, and counted.
check: $(VENV)/installed-test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	@files="$$($(VENV)/bin/python tests/changed.py --sources $(SINCE))"; test -z "$$files" || \
		$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python $$files
	@files="$$($(VENV)/bin/python tests/changed.py $(SINCE))"; test -z "$$files" || \
		$(VENV)/bin/python -m pytest -q --numprocesses=2 --dist=loadfile \
		--no-loadscope-reorder --seconds=$(SECONDS) $$files

test-with-%: $(VENV)/installed-test $(VENV)-%/installed
	PACKAGE_PYTHON=$(abspath $(VENV)-$*)/bin/python \
		$(VENV)/bin/python -m pytest $(wildcard $(foreach folder,tests tests/contrib/*,\
			$(folder)/test_with_$(subst -,_,$*).py)) $(ARGS)

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/installed-test
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: $(VENV)/installed-test
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet
	@echo "runs/site/index.html; with search: python3 -m http.server --directory runs/site"

# Of a copy of the last commit: a build writes into its source.
wheel: $(VENV)/installed-test
	rm -rf runs/wheel
	mkdir -p runs/wheel/source
	git archive HEAD | tar -x -C runs/wheel/source
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation \
		--wheel-dir runs/wheel runs/wheel/source
	rm -rf runs/wheel/source
	@ls runs/wheel/*.whl

clean:
	rm -rf $(VENV) $(VENV)-*

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { \
	  echo "Python 3.11, 3.12 or 3.13 with its venv module is needed: make PYTHON=/path/to/python" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

# Installs $(2) in the environment $(1). pip compiles modules one after another; all cores
# take half of the time. Of large packages few modules are imported, and those are compiled
# then. A file that is no Python of this version stays as it is. pip 26 shows what
# setuptools warns the author of a package of; here that are 50 lines.
large := anthropic|debugpy|fontTools|numba|openai|pip|pydantic_ai|ray|sympy
large := $(large)|tensorflow_datasets|transformers/models
define install
	PYTHONWARNINGS=ignore $(1)/bin/python -m pip install --quiet --no-compile $(2)
	$(1)/bin/python -W ignore -m compileall -qq -j 0 -x '/($(large))/' $(1)/lib || true
endef

# The stamps are younger than the requirements: no change, no installation. The first one
# holds the EXTRA that the environment was made with, which an update keeps.
made := $(shell cat $(VENV)/installed 2>/dev/null)
$(VENV)/installed: requirements.txt pyproject.toml | $(VENV)/bin/python same-extra
	@test ! -e $@ || echo "$(VENV) is updated: requirements.txt or pyproject.toml is newer" >&2
	$(call install,$(VENV),--requirement requirements.txt \
		--editable '.$(patsubst %,[%],$(or $(EXTRA),$(made)))')
	@echo $(or $(EXTRA),$(made)) > $@

same-extra:
	@test -z "$(EXTRA)" || test ! -e $(VENV)/installed || test "$(EXTRA)" = "$(made)" || { \
	  echo "$(VENV) has the JAX of $(or $(made),a CPU), not of EXTRA=$(EXTRA): make clean first" >&2; \
	  exit 1; }

$(VENV)/installed-test: requirements-test.txt $(VENV)/installed
	$(call install,$(VENV),--requirement requirements-test.txt)
	@touch $@

# What packages/alone names is installed without its own requirements.
.SECONDEXPANSION:
$(VENV)-%/installed: tests/packages/%.txt $$(wildcard tests/packages/alone/$$*.txt) \
		| $(VENV)/bin/python
	$(VENV)/bin/python -m venv $(VENV)-$*
	$(call install,$(VENV)-$*,--requirement $<)
	$(if $(word 2,$^),$(call install,$(VENV)-$*,--no-deps --requirement $(word 2,$^)))
	@touch $@
