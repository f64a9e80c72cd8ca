# Everything from a fresh machine with Python >= 3.10 and g++:
#   make demo      set up, train a small network on 4 ranks, over a slow link and locally, print tables
#   make test      set up, run the tests, C++ and Python
#   make nightly   what takes longer: see CONTRIBUTING.md
#   make test-with WHAT=torch TORCH=2.7.1  the tests with something that the machine may lack; WHAT is a
#                  script of .ci/with: arm64, cuda12, ray, rdma, torch, torch-suites or trainers
#   make cuda      the CUDA part for one architecture, and its tests; needs nvcc, but no GPU
#   make bench     the pytest-benchmark bandwidth suites
#   make wheel     a wheel for this Python and old Linux machines, in dist/, tried where no compiler is;
#                  PYTHONS="python3.10 python3.12": one for each of them
#   make sdist     the sources, in dist/
#   make docs      the documentation as HTML, in build/docs; warnings are errors
#   make lint      format and check;  make lint-check only checks
#   make sanitize  the C++ tests under AddressSanitizer + UBSan and under ThreadSanitizer;
#                  SANITIZE_CUDA=ON: those of the CUDA part under the first too, which takes minutes
#   make faults    COUNT=1000 random jobs with a random fault each, from a SEED that is printed. KIND=training
#                  over the backend of torch.distributed, serving: servers and clients of a parameter
#                  server, elastic: ranks that die, stop and join, elastic_training: the same in trainings,
#                  false_alarms: busy and stopped ranks that must not count as dead
#   make mutants   COUNT=100 small changes in the code, from a SEED, and whether tests notice them
#   make soak      MINUTES=120 of a bit of everything, after which memory must have come to a plateau
#   make fuzz      every parser of foreign bytes under libFuzzer, FUZZ_SECONDS=60 in all
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
CLANG ?= clang++-19
FUZZ_SECONDS ?= 60
SANITIZE_CUDA ?= OFF
COUNT ?= 1000
# Tests that run at once: they wait for each other's ranks most of the time.
JOBS ?= $(shell echo $$(($(shell nproc) * 2)))
CTEST := ctest --output-on-failure --no-tests=error -j $(JOBS) --test-dir
# Modules are compiled when they are first imported: most of torch's never are.
PIP := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Where it is set, as in many containers, each process would compile all of torch's modules anew.
unexport PYTHONDONTWRITEBYTECODE

BUILT := build/release/.built
NATIVE := CMakeLists.txt pyproject.toml $(wildcard cmake/* csrc/gradwire/*/* csrc/gradwire/*/*/*)
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cc' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' \
  'tests/*.cc' 'bench/*.h' 'bench/*.cc')

.PHONY: demo test test-cpp test-python test-with nightly bench docs lint lint-check wheel one-wheel sdist cuda sanitize \
  sanitize-build faults mutants soak fuzz fuzz-build build tools clean
demo: build
	@sh .ci/system-packages --demo
	$(BIN)/python -m bench.training.demo $(ARGS)

test: test-cpp test-python

# CPP_TESTS=regex chooses fewer tests, which are compiled one by one then. (CPP is make's own.)
CPP_TESTS ?= .
test-cpp: $(BUILT) .system-packages
	@echo "== C++ tests"
	cmake -S . -B build/release -DGRADWIRE_TESTS=$(if $(filter .,$(CPP_TESTS)),TOGETHER,ON) >/dev/null
	ninja -C build/release $(if $(filter-out .,$(CPP_TESTS)),extension $(call tests_named,build/release,$(CPP_TESTS)))
	$(CTEST) build/release -R '$(CPP_TESTS)' $(if $(NIGHTLY)$(filter-out .,$(CPP_TESTS)),,$(QUICK_CPP))

# NIGHTLY=1: also those that are marked so, or named in tests/python/nightly.txt, and all shares of the
# longest C++ programs.
QUICK_CPP := -E '^cuda_(communicator|direct)_test_[1-3]$$'
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
QUICK := $(if $(NIGHTLY),,-m 'not nightly')
test-python: $(VENV)/test-modules
	cmake -S . -B build/release -DGRADWIRE_SIMULATED_CUDA=ON -DGRADWIRE_BENCH=ON >/dev/null
	ninja -C build/release simulated_cuda gpu_kernels gpu_jobs
	@echo "== Python tests"
	$(PYTEST) $(QUICK) $(ARGS)

# What takes too long for every change, beside what `make test` runs. SEED: of `make faults`.
nightly:
	$(PYTHON) tests/fresh_clone.py
	$(MAKE) test NIGHTLY=1
	if command -v nvcc >/dev/null; then $(MAKE) cuda NIGHTLY=1; fi
	$(MAKE) faults
	$(MAKE) faults KIND=training COUNT=100
	$(MAKE) faults KIND=serving COUNT=200
	$(MAKE) faults KIND=elastic
	$(MAKE) faults KIND=elastic_training COUNT=300
	$(MAKE) faults KIND=false_alarms COUNT=200
	$(MAKE) mutants COUNT=100
	$(MAKE) soak
	$(MAKE) fuzz FUZZ_SECONDS=600
	$(MAKE) sanitize SANITIZE_CUDA=ON
	$(MAKE) wheel
	$(MAKE) test-with WHAT=torch-suites NIGHTLY=1
	$(MAKE) test-with WHAT=torch TORCH=2.7.1
	$(MAKE) test-with WHAT=torch TORCH=2.15.0
	for what in rdma cuda12 ray trainers arm64; do $(MAKE) test-with WHAT=$$what || exit; done

export PYTHON BIN JOBS TORCH ARGS NIGHTLY
test-with: build $(VENV)/test-packages .system-packages
	@echo "== Tests with $(WHAT)"
	.ci/with/$(WHAT)

# One architecture: others only repeat the compiler's last steps, and nothing here runs what is optimised.
# NIGHTLY=1: what looks at the machine code of topk.cu, too, which takes longest.
CUDA_BUILD := build/cuda
cuda: build $(VENV)/test-packages
	@echo "== Building the CUDA part"
	cmake -G Ninja -S . -B $(CUDA_BUILD) -DGRADWIRE_PYTHON=OFF -DGRADWIRE_CUDA=ON \
	  -DCMAKE_CUDA_ARCHITECTURES=80 \
	  -DCMAKE_CUDA_FLAGS=$$(nvcc --help | grep -q Ofast-compile && echo --Ofast-compile=max) >/dev/null
	ninja -C $(CUDA_BUILD) gradwire_cuda_plugin
	.ci/cuda-built $(CUDA_BUILD)
	$(BIN)/pip install -q 'nvidia-cuda-cuobjdump>=13' 'nvidia-cuda-nvdisasm>=13'
	GRADWIRE_CUDA_SO=$(CUDA_BUILD)/libgradwire_cuda.so $(BIN)/python -m pytest -q $(QUICK) \
	  tests/python/gpus/test_cuda_build.py tests/python/gpus/test_cuda_code.py

# SEED=… repeats a run; ARGS="--only N" one case of it.
faults: build $(VENV)/test-packages
	$(BIN)/python -m tests.faults$(if $(KIND),.$(KIND)) --count $(COUNT) \
	  $(if $(SEED),--seed $(SEED)) $(ARGS)

# In a copy of what is committed. ARGS: of the run over Python, such as `--only torch/elastic`.
mutants: build $(VENV)/test-packages
	$(BIN)/python -m tests.mutants.python --count $(COUNT) $(if $(SEED),--seed $(SEED)) $(ARGS)
	$(BIN)/python -m tests.mutants.cpp

MINUTES ?= 120
soak: build $(VENV)/test-packages
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

bench: build $(VENV)/test-packages
	$(BIN)/python -m pytest bench/collectives --benchmark-only $(ARGS)

# Of the installed package: the reference comes from its docstrings.
docs: build $(VENV)/documenters
	sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/docs

# Modules that tests import, and tests: else each of the workers compiles all of them on a fresh machine.
$(VENV)/test-modules: $(VENV)/test-packages | build
	@.ci/step "Compiling the tests' modules" $(BIN)/python -m pytest --collect-only -q >/dev/null
	@touch $@

$(VENV)/documenters: $(VENV)/packages
	$(PIP) $$($(BIN)/python .ci/requirements.py docs)
	@touch $@

# GLIBC: the oldest that it is for. It is tried in a fresh environment, without a compiler, by tests that
# go through most of what is compiled.
GLIBC ?= 2.17
WHEEL_TESTS := $(addsuffix .py,$(addprefix tests/python/,calls/test_collectives calls/test_error_texts \
  compression/test_feedback compression/test_python_codecs failures/test_closing failures/test_faults \
  torch_hook/test_torch_hook))
PYTHONS ?=
wheel:
	rm -rf dist
	$(if $(PYTHONS),for each in $(PYTHONS); do \
	  $(MAKE) one-wheel PYTHON=$$each VENV=build/venv-$${each##*/} || exit; done,$(MAKE) one-wheel)

one-wheel: $(VENV)/wheelwrights $(VENV)/test-packages
	@echo "== Building a wheel for glibc $(GLIBC)"
	.ci/wheel $(BIN)/python dist $(GLIBC)
	.ci/check-wheel $(BIN)/python dist/*-$$($(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl \
	  $(WHEEL_TESTS)

sdist: $(VENV)/tools
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; print(build_sdist("dist"))'

$(VENV)/wheelwrights: $(VENV)/tools
	$(PIP) $$($(BIN)/python .ci/requirements.py wheel)
	@touch $@

# The compiler runs while packages are installed.
build: $(VENV)/tools
	@$(MAKE) --no-print-directory -j2 $(VENV)/packages $(BUILT)

# Its libraries are those of the C++ tests.
$(BUILT): $(VENV)/tools $(NATIVE)
	@.ci/step "Building the extension, which takes minutes" \
	  $(PIP) --no-build-isolation --no-deps --config-settings=build-dir=build/release --config-settings=build.targets=extension --editable .
	@touch $@

$(VENV)/packages: $(VENV)/tools pyproject.toml constraints.txt
	@.ci/step "Installing packages (torch's CPU build among them)" \
	  $(PIP) $$($(BIN)/python .ci/requirements.py demo)
	@touch $@

$(VENV)/test-packages: $(VENV)/packages
	@.ci/step "Installing packages for tests and benchmarks" \
	  $(PIP) $$($(BIN)/python .ci/requirements.py torch plot demo bench test)
	@touch $@

# What builds: scikit-build-core, pybind11, cmake and ninja, all from PyPI.
$(VENV)/tools: pyproject.toml
	@.ci/step "Making the virtual environment $(VENV)" sh .ci/venv $(PYTHON) $(VENV)
	@.ci/step "Installing what builds" $(PIP) cmake ninja $$($(BIN)/python .ci/requirements.py build)
	@touch $@

# Debian's GoogleTest, for the C++ tests; installed where this user may, else named.
.PHONY: .system-packages
.system-packages:
	@sh .ci/system-packages

# All that builds of C++ need.
tools: $(VENV)/tools .system-packages
	@sh .ci/system-packages $(CLANG)

lint-check: $(VENV)/linters
	clang-format --dry-run --Werror $(CXX_FILES)
	ruff format --check python tests bench docs examples .ci
	ruff check python tests bench docs examples .ci
	mypy

lint: $(VENV)/linters
	clang-format -i $(CXX_FILES)
	ruff format python tests bench docs examples .ci
	ruff check --fix python tests bench docs examples .ci
	mypy

$(VENV)/linters: $(VENV)/packages
	$(PIP) $$($(BIN)/python .ci/requirements.py lint)
	@touch $@

# The address sanitizer shares its build with the fuzz targets. The thread sanitizer looks at tests
# that have threads. ADDRESS=regex and THREAD=regex choose fewer tests.
ADDRESS ?= ^(base|schedule|codec|transport|serve|exec$(if $(filter ON,$(SANITIZE_CUDA)),|cuda))_
THREAD ?= ^(exec|serve|transport|codec_feedback)_
# The programs of the tests in a build whose names match. A test may be one of several shares of its program.
tests_named = $$(ctest --test-dir $(1) -N -R '$(2)' 2>/dev/null | sed -nE 's/.*: ([a-z0-9_]+_test)(_[0-9])?$$/\1/p' | sort -u)
sanitize: sanitize-build
	$(CTEST) build/address -R '$(ADDRESS)'
	$(CTEST) build/thread -R '$(THREAD)'

sanitize-build: .address
	@echo "== Building the C++ tests for the sanitizers"
	ninja -C build/address $(call tests_named,build/address,$(ADDRESS))
	cmake -G Ninja -S . -B build/thread -DGRADWIRE_PYTHON=OFF -DGRADWIRE_TESTS=ON \
	  -DGRADWIRE_TEST_CUDA=OFF -DGRADWIRE_SANITIZE=thread \
	  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 >/dev/null
	ninja -C build/thread $(call tests_named,build/thread,$(THREAD))

# What is in C++ needs clang, what is in Python atheris: both have libFuzzer. FUZZ=regex chooses fewer
# targets, by the names of their files; ARGS=--keep adds what was found to the committed corpora.
FUZZ ?= .
fuzz_files = ls tests/fuzz | grep -E '_fuzz\.(cc|py)$$' | grep -E '$(FUZZ)'
fuzz: build $(VENV)/fuzzer fuzz-build
	@echo "== Fuzzing for $(FUZZ_SECONDS) s"
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(ARGS) \
	  $$($(fuzz_files) | sed -E 's#(.*)\.cc$$#build/address/&#; s#\.cc$$##; s#[^/]*$$#tests/fuzz/&#')

fuzz-build: .address
	$(fuzz_files) | sed -n 's/\.cc$$//p' | xargs -r ninja -C build/address

.PHONY: .address
.address: tools
	cmake -G Ninja -S . -B build/address -DCMAKE_CXX_COMPILER=$(CLANG) -DGRADWIRE_PYTHON=OFF \
	  -DGRADWIRE_TESTS=ON -DGRADWIRE_TEST_CUDA=$(SANITIZE_CUDA) -DGRADWIRE_FUZZ=ON \
	  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 >/dev/null

$(VENV)/fuzzer: $(VENV)/packages
	$(PIP) $$($(BIN)/python .ci/requirements.py fuzz)
	@touch $@

clean:
	rm -rf build $(VENV)
