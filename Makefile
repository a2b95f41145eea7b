# `make demo` and `make test` are the two commands of the README; every target makes the environment first if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test mutants sanitize tritons lint types layers check format

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## make the virtual environment with the pinned packages

# Three steps: the second builds the package against the torch that the first installs (and reasoning-gym needs a C
# compiler), the third adds the projects that the tests compare with, without what they would put in place of our pins.
$(INSTALLED): pyproject.toml constraints.txt parity.txt setup.py grpo_kernels/formulas.py $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt setuptools wheel ninja numpy torch
	$(BIN)/python -m pip install --no-build-isolation -c constraints.txt -e '.[train,dev]'
	$(BIN)/python -m pip install --no-deps -c constraints.txt -r parity.txt
	touch $@

demo: $(INSTALLED)  ## train a small model on the spot and show that it improves; ARGS="--seed 1" passes options on
	$(BIN)/grpo-kernels train $(ARGS)

# The second run takes a sample of the tests that know nothing of implementations to the Triton kernels, interpreted.
test: $(INSTALLED)  ## run the tests, two at a time; ARGS="-k name" passes options on, and then runs nothing else
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)
	$(if $(ARGS),,GRPO_KERNELS_BACKEND=triton $(BIN)/python -m pytest -n 2 --dist loadfile)

mutants: $(INSTALLED)  ## wrong lines in the loss mathematics, one at a time: a check must notice each
	$(BIN)/python tests/mutation/run.py

# A copy of the tree, built with checks of every access and of undefined behaviour; the interpreter itself is not.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
SANITIZED := build/sanitized
sanitize: $(INSTALLED)  ## the tests of the C++ kernels under the address and undefined-behaviour sanitizers
	@command -v g++ > /dev/null || { echo "make sanitize: needs g++"; exit 1; }
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -r setup.py pyproject.toml README.md LICENSE csrc grpo_kernels tests $(SANITIZED)
	cd $(SANITIZED) && CFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" GRPO_KERNELS_BUILD_CPP=1 \
	  $(abspath $(BIN))/python setup.py -q build_ext --inplace --force
	cd $(SANITIZED) && ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=. \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  $(abspath $(BIN))/python -m pytest tests/test_cpp_rows.py tests/test_cpp_safety.py tests/test_cpp_loss.py \
	  tests/test_cpp_measures.py tests/test_cpp_quick.py

TRITONS := 3.6.0 3.9.0  # the interpreter of the former needs an older numpy
tritons: $(INSTALLED)  ## the Triton kernels, interpreted, on the oldest Triton (that of torch 2.10) and a newer one
	for version in $(TRITONS); do \
	  $(BIN)/python -m pip install -q --no-deps --upgrade --target build/triton-$$version triton==$$version numpy==2.2.6 && \
	  PYTHONPATH=build/triton-$$version $(BIN)/python -W ignore::DeprecationWarning -m pytest -W ignore::DeprecationWarning \
	    tests/test_triton_rows.py tests/test_triton_loss.py tests/test_triton_safety.py || exit 1; \
	done

lint: $(INSTALLED)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## mypy, strict
	$(BIN)/mypy

layers: $(INSTALLED)  ## import-linter: lower layers import nothing above them
	$(BIN)/lint-imports

check: lint types layers test  ## everything that a change must pass

format: $(INSTALLED)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
