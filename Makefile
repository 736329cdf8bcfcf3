# Everything runs in a private environment under .venv, made on first use and brought up to date when what it was made
# from changes. Needed beforehand: python3 (3.10 or newer, with its venv module and headers), make and g++, or the
# compiler that CXX names.
#
#   make demo      the speed table, a collapse and its cure on handwritten digits, and a report: some minute
#   make test      the tests, those of the GPU kernels in Triton's interpreter, and a sample of those of their PTX
#   make test-ptx  all tests of the GPU kernels on the PTX that they compile to, executed by an emulator
#   make test-gpu  the tests and the speed table on a GPU
#   make fuzz      100,000 calls of all functions with rows of all kinds (some twenty minutes; stopped, it goes on)
#   make words     the type stub and the README's tables, written anew from tripletops/_words.py
#   make lint      ruff, mypy and clang-format
#   make bench     every row of both speed tables, core and dense (some ten minutes)
#   make sanitize  the kernel tests under the address and undefined-behaviour sanitizers
#   make clean     remove all that the above made, the environment included

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PACKAGES := $(VENV)/packages.stamp
LINTERS := $(VENV)/linters.stamp
BUILT := $(VENV)/built.stamp
CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' 2>/dev/null)

# What could leak in from the caller's shell: other Python environments, and compiler flags, of which -march=native
# or -ffast-math would change what the kernels compute.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV CONDA_PREFIX PIP_USER PIP_TARGET PIP_PREFIX
unexport CFLAGS CXXFLAGS CPPFLAGS LDFLAGS TRIPLETOPS_SANITIZE TRITON_INTERPRET
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: demo test test-ptx test-gpu fuzz words lint bench sanitize clean

demo: $(BUILT)
	@$(PY) -m train_ref.demo

# Triton asks for the interpreter when it is imported, so a process either interprets kernels or compiles them. Both
# processes need one core, so they run beside the rest, one after the other, and then the tests of BESIDE; their output
# comes last. The second one executes what the kernels compile to: tests/ptx, and as many of the calls of
# test_compiled.py as PTX_SECONDS of processor time allow. PTX_SEED chooses these; without it they are others each time.
INTERPRETED := tests/backends --ignore=tests/backends/cpu --ignore=tests/backends/test_registry.py
EXECUTED := tests/ptx tests/backends/triton/test_compiled.py
ON_PTX := TRIPLETOPS_TEST_PTX=1 TRIPLETOPS_BACKEND=triton $(PY) -m pytest
PTX_SECONDS ?= 45
PTX_SEED ?=
PTX_SAMPLE = -p tests.ptx.sample --sample $(PTX_SECONDS) $(PTX_SEED:%=--sample-seed %)
BESIDE := tests/train_ref tests/diagnostics

test: $(BUILT)
	@mkdir -p build; \
	( failed=0; \
	  TRITON_INTERPRET=1 TRIPLETOPS_BACKEND=triton $(PY) -m pytest $(INTERPRETED) || failed=1; \
	  $(ON_PTX) $(PTX_SAMPLE) $(EXECUTED) || failed=1; \
	  $(PY) -m pytest $(BESIDE) || failed=1; \
	  exit $$failed ) >build/beside.log 2>&1 & \
	beside=$$!; trap 'kill $$beside' INT TERM; \
	failed=0; $(PY) -m pytest $(patsubst %,--ignore=%,tests/ptx $(BESIDE)) || failed=1; \
	wait $$beside || failed=1; \
	cat build/beside.log; exit $$failed

test-ptx: $(BUILT)
	@$(ON_PTX) $(EXECUTED) tests/backends/triton/test_tiles.py \
	  $(filter-out %/test_registry.py,$(wildcard tests/backends/test_*.py))

# PyPI's torch is a CUDA build, and so is the one in .venv, unless the package index offers a CPU build. Where that is
# so, or the GPU is AMD's, use an environment that has the right torch and in which `pip install -e '.[test]'` was run:
#   make test-gpu GPU_PYTHON="$(which python)"
# The tests ask for deterministic algorithms, and cuBLAS has some only with a workspace of fixed size.
GPU_PYTHON ?= $(PY)
FIND_GPU := import sys, torch; found = torch.cuda.is_available(); \
  found or print("No GPU here that torch", torch.__version__, "could use: nothing was run"); sys.exit(found)
GPU_TESTS := $(INTERPRETED) tests/test_nn.py tests/test_arguments.py

test-gpu: $(if $(filter $(PY),$(GPU_PYTHON)),$(BUILT))
	@if ! $(GPU_PYTHON) -c '$(FIND_GPU)'; then \
	  TRIPLETOPS_TEST_DEVICE=cuda CUBLAS_WORKSPACE_CONFIG=:4096:8 $(GPU_PYTHON) -m pytest $(GPU_TESTS); \
	  $(GPU_PYTHON) -m bench core --device cuda; \
	fi

# make fuzz FUZZ="--seed 1 --fresh": the options are those of `python -m tests.fuzz`, which --help lists.
FUZZ ?=

fuzz: $(BUILT)
	@$(PY) -m tests.fuzz $(FUZZ)

words: $(BUILT)
	@$(PY) docs/write.py

lint: $(BUILT) $(LINTERS)
	ruff check .
	ruff format --check .
	$(PY) -m mypy
	clang-format --dry-run -Werror $(CSRC)

bench: $(BUILT)
	@$(PY) -m bench core
	@$(PY) -m bench dense

# The sanitizers' run-time has to be in the process before Python is, and with it the C++ library whose exceptions
# it watches. The conftest is left out, for it brings torch.
sanitize: $(BUILT)
	TRIPLETOPS_SANITIZE=1 $(PY) setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize/objects
	TRIPLETOPS_KERNELS_PATH="$$(ls build/sanitize/tripletops/_kernels*.so)" \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	$(PY) -m pytest --noconftest -p no:cacheprovider tests/backends/cpu

clean:
	rm -rf $(VENV) build dist results/demo *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f tripletops/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.10 or newer" >&2; exit 1; }
	@command -v $(CXX) >/dev/null \
	  || { echo "$(CXX) is missing: install GCC 12 or newer (Debian, Ubuntu: apt install g++)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$$($(PYTHON) -V) is too old: 3.10 or newer is needed (make PYTHON=python3.12 ...)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
	  || { echo "$(PYTHON) has no headers: install them (Debian, Ubuntu: apt install python3-dev)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch and the build tools come first: the extension is built without isolation, against this very torch.
$(PACKAGES): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "Installing torch and the build tools into $(VENV): minutes where the downloads are slow"
	@$(PIP) install -qq -c constraints.txt torch numpy 'setuptools>=77' 'pybind11>=2.13' ninja
	@touch $@

$(BUILT): $(PACKAGES) setup.py csrc/words.py tripletops/_words.py $(CSRC)
	@echo "Building tripletops"
	@$(PIP) install -qq -c constraints.txt --no-build-isolation -e '.[test]'
	@touch $@

$(LINTERS): $(PACKAGES)
	@$(PIP) install -qq -c constraints.txt ruff mypy clang-format
	@touch $@
