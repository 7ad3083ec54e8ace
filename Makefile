# make train, make test: what they need is installed into .venv first; a second call starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Named after the content of pyproject.toml, so that a changed one is installed anew and a touched one is not.
STAMP := $(VENV)/.installed-$(shell cksum pyproject.toml | cut -d' ' -f1)
TORCH := torch==2.13.0
TRITON := triton==3.6.0
# Kernels are compiled with this one, too (tests/test_newest_triton.py); it stands beside the one in use.
NEWEST := 3.9.0
NEWEST_STAMP := $(VENV)/newest-triton/.installed-$(NEWEST)

.DEFAULT_GOAL := help
.PHONY: help train test test-all check setup clean

help:
	@echo "make train   train a small language model on the Python standard library's sources (ARGS='--steps 20' adds options)"
	@echo "make test    ruff, mypy, pytest"
	@echo "make test-all   the same and the tests that take longest"
	@echo "make check   ruff and mypy only"
	@echo "make setup   only install into $(VENV); PYTHON=python3.12 chooses another Python"
	@echo "make clean   remove $(VENV) and caches; runs/ stays"

train: $(STAMP)
	$(BIN)/python -m mok train $(ARGS)

test: check $(NEWEST_STAMP)
	MOK_TEST_NEWEST_TRITON=$(NEWEST) $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-all: check $(NEWEST_STAMP)
	MOK_TEST_NEWEST_TRITON=$(NEWEST) $(BIN)/python -m pytest -n 2 --dist loadfile -m '' $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(STAMP)

# Torch first: its own pin of Triton, where it has one, wins; wheels without one get ours.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Choose another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)' 'numpy<2.4'
	@case "$$(uname -sm)" in "Linux x86_64") \
		$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TRITON)';; esac
	$(BIN)/python -m pip install --quiet -e '.[test]' '$(TORCH)' 'numpy<2.4'
	@rm -f $(VENV)/.installed-*
	@touch $@

$(NEWEST_STAMP): $(STAMP)
	@case "$$(uname -sm)" in "Linux x86_64") \
		rm -rf $(VENV)/newest-triton; \
		$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/newest-triton triton==$(NEWEST);; esac
	@mkdir -p $(@D)
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
