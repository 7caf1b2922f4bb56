# Everything a developer runs. Each target makes the environment it needs, with pip and venv alone;
# stamps keep what is up to date. PYTHON is the interpreter to build environments from (>= 3.11).
#
#   make demo   .venv       steps within half and a quarter of torch's memory, on this machine
#   make quick  .venv-test  what takes no time and no processes of its own, on the installed package:
#                           for while you work; a minute
#   make test   .venv-test  the suite and the doctests, but for what is nightly, on the installed
#                           package; lines and branches of values, solvers, cache and kernels
#   make avx2   .venv-test  tests/backend as on a processor without AVX-512
#   make bare   .venv-bare  imports of every module and the commands, without optional dependencies;
#                           .venv-test is the same environment with more beside it
#   make cudnn  .venv-test  tests/cudnn by real cuDNN without a GPU; fetches the wheels of CUDNNS,
#                           500 MB each
#   make simulated-gpu      .venv-test: tests/gpu and failures on a GPU that is simulated by cuDNN
#   make nightly            .venv-test: what takes long: models, processors, ranks, plan files damaged in
#                           their thousands, three releases of cuDNN, all benchmarks on the
#                           simulated GPU, the documentation site; some hours
#   make gpu    PYTHON      tests and measurements on this machine's GPU, in GPU_MINUTES; PYTHON is
#                           one with torch for CUDA; nothing is installed
#   make bench  .venv-test  steps of ten networks, or of NETWORKS, by torch in every way and by a plan,
#                           in turn; a run that was stopped goes on with what is in
#                           build/bench.json
#   make peers  .venv-test  four networks, or NETWORKS, within less memory: every way by torch at the best
#                           setting of its own sweep, and plans at the same peaks; four hours; a run
#                           that was stopped goes on with what is in build/peers.json
#   make paper  .venv-test  the tables of µ-cuDNN on this machine: steps and layers by each policy within
#                           workspace limits, in build/limits.json and build/limits_layers.json
#   make docs   .venv-docs  the documentation site, in build/docs
#   make lint, make types, make dist, make clean

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2
GPU_MINUTES ?= 30
NETWORKS ?=
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: demo quick test avx2 bare cudnn simulated-gpu nightly gpu bench peers paper docs lint types dist clean

ROOT := $(CURDIR)
# Folders too: their time changes when a file goes away.
SOURCES := $(shell find ucudnn solvers cache -name '*.py' -o -name '*.c' -o -name '*.json' -o -type d ! -name __pycache__) \
	ucudnn/py.typed
# The sdist has them, too.
DOCS := mkdocs.yml CHANGELOG.md CONTRIBUTING.md $(shell find docs -type f ! -path '*/__pycache__/*')
PIP := -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# torch comes first and by its exact version: see constraints.txt.
TORCH := $(shell grep '^torch==' constraints.txt)

# The one that the simulated GPU has: torch 2.11 for CUDA 13 ships it.
CUDNNS := 9.19.0.56
# The newest first, then those that torch's wheels for CUDA 13 ship: 2.13's and 2.11's.
ALL_CUDNNS := 9.28.0.42 9.20.0.48 9.19.0.56
NOTHING :=
COLON_LIST = $(subst $(NOTHING) $(NOTHING),:,$(1))

# Per environment: extras of the package, and tools beside it. .venv-test has torch, pytest and the
# package from .venv-bare, so that they are installed once.
EXTRAS.venv :=
EXTRAS.venv-test := [test,report]
TOOLS.venv-test := mypy ruff import-linter pytest-cov
EXTRAS.venv-bare :=
TOOLS.venv-bare := pytest pytest-xdist hypothesis
TOOLS.venv-docs := mkdocs-material 'mkdocstrings[python]' ruff typer rich msgspec
TOOLS.venv-build := build setuptools wheel
# These need no torch, or have it from elsewhere.
.venv-docs/.ready .venv-build/.ready .venv-test/.ready: private TORCH :=

demo: .venv/.installed
	.venv/bin/python examples/demo.py

# Outside the checkout, without PYTHONPATH and with -P: only the installed ucudnn can be imported.
# Arguments: environment, module and its arguments.
define outside
cd "$$(mktemp -d)"; trap 'rm -rf "$$PWD"' EXIT; \
env -u PYTHONPATH "$(ROOT)/$(1)/bin/python" -P -m $(2)
endef
PYTEST = pytest -rs --config-file "$(ROOT)/pyproject.toml" --rootdir "$(ROOT)" -p no:cacheprovider

# Several processes share the tests. OpenMP's threads sleep while they wait, or they would keep the
# other process from its processor. On each push torch computes in one thread, unless a test or
# `make avx2` says otherwise.
# Each process begins with its part of the files, and takes tests of others when it has no more.
PARALLEL = $(PYTEST) "$(ROOT)/tests" --pyargs ucudnn $(PYTEST_ARGS) -n $(WORKERS) --dist worksteal
QUICK = not slow and not process and not gpu and not nightly
# Values, solvers, the cache, and what decides on kernels: see pyproject.toml.
COVERAGE := 95
# What decides on steps, which takes real steps to show.
STEPS := steps advice outcomes segment verdict
COVERAGE_OF_STEPS := 94
test quick avx2 bare nightly: export OMP_WAIT_POLICY := passive
test quick bare: export OMP_NUM_THREADS := 1

# A part of the suite covers less: with PYTEST_ARGS there is no gate.
test: .venv-test/.installed
	$(call outside,.venv-test,$(PARALLEL) -m "not nightly" $(if $(PYTEST_ARGS),,--cov \
	--cov-config "$(ROOT)/pyproject.toml" --cov-report term --cov-fail-under $(COVERAGE)))

quick: .venv-test/.installed
	$(call outside,.venv-test,$(PARALLEL) -m "$(QUICK)")

# As on a processor without AVX-512, as far as libraries can be told so; without tests of the check
# against float64 and of cuDNN's engines, which are the same on any.
avx2: export ONEDNN_MAX_CPU_ISA := AVX2
avx2: export ATEN_CPU_CAPABILITY := avx2
avx2: .venv-test/.installed
	$(call outside,.venv-test,$(PYTEST) -n $(WORKERS) -m "not nightly and not process" \
	"$(ROOT)/tests/backend" --ignore-glob "*/test_accuracy.py" \
	--ignore-glob "*/test_engine_executable.py" $(PYTEST_ARGS))

# What else computes with torch alone, which is the same with optional dependencies and without.
bare: .venv-bare/.installed
	.venv-bare/bin/python -c 'from importlib.util import find_spec; \
	names = ("cupy", "mpi4py", "plotly", "transformers", \
	"monai", "diffusers", "pytorch_lightning", "expecttest"); \
	there = [name for name in names if find_spec(name)]; \
	assert not there, f"optional dependencies are installed: {there}"'
	$(call outside,.venv-bare,$(PYTEST) -m "$(QUICK)" "$(ROOT)/tests/cli" \
	"$(ROOT)/tests/pure/test_imports.py" "$(ROOT)/tests/pure/test_registry.py" $(PYTEST_ARGS))

# A version that cannot be loaded fails its tests; only where no folder is named are they skipped.
cudnn: .venv-test/.installed $(CUDNNS:%=.cudnn/%/.unpacked)
	export CUDNN_TEST_FOLDERS="$(call COLON_LIST,$(CUDNNS:%=$(ROOT)/.cudnn/%))"; \
	$(call outside,.venv-test,$(PYTEST) "$(ROOT)/tests/cudnn" $(PYTEST_ARGS))

SIMULATED_CUDNN := 9.19.0.56
SIMULATED = export SIMULATED_GPU_CUDNN="$(ROOT)/.cudnn/$(SIMULATED_CUDNN)/nvidia/cudnn/lib/libcudnn.so.9"
simulated-gpu: .venv-test/.installed .cudnn/$(SIMULATED_CUDNN)/.unpacked
	$(SIMULATED); $(call outside,.venv-test,$(PYTEST) -m "not nightly" "$(ROOT)/tests/simulated_gpu" \
	-n $(WORKERS) $(PYTEST_ARGS))

# Every case of what has no end, and 10,000 damaged plan files.
nightly: .venv-test/.installed .cudnn/$(SIMULATED_CUDNN)/.unpacked
	$(SIMULATED); $(call outside,.venv-test,$(PARALLEL) -m nightly --complete --mutations 10000)
	$(call outside,.venv-test,$(PYTEST) "$(ROOT)"/tests/{steps,layers,pure} \
	--complete -n $(WORKERS) -m "not nightly" $(STEPS:%=--cov ucudnn.%) --cov-branch \
	--cov-fail-under $(COVERAGE_OF_STEPS))
	$(MAKE) cudnn CUDNNS="$(ALL_CUDNNS)"
	$(MAKE) docs

bench: .venv-test/.installed
	mkdir -p build
	.venv-test/bin/python benchmarks/whole_steps.py $(NETWORKS) --quick --out build/bench.json

peers: .venv-test/.installed
	mkdir -p build
	.venv-test/bin/python benchmarks/peers.py $(NETWORKS) --out build/peers.json

paper: .venv-test/.installed
	mkdir -p build
	rm -f build/limits.json
	.venv-test/bin/python benchmarks/limits.py cifar10 --out build/limits.json
	.venv-test/bin/python benchmarks/limits.py alexnet --input 256x3x224x224 --limits 64MiB \
		--effort quick --rounds 6 --out build/limits.json
	.venv-test/bin/python benchmarks/limits_layers.py --out build/limits_layers.json

gpu:
	PYTHONPATH="$(ROOT)" $(PYTHON) benchmarks/gpu_run.py --minutes $(GPU_MINUTES)

# Convolutions need none of the four libraries that are removed.
.cudnn/%/.unpacked: | .venv-test/.ready
	rm -rf .cudnn/$*
	.venv-test/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target .cudnn/$* \
	nvidia-cudnn-cu13==$*
	cd .cudnn/$*/nvidia/cudnn/lib && rm -f libcudnn_adv.so.9 libcudnn_cnn.so.9 libcudnn_ext.so.9 \
	libcudnn_ops.so.9
	touch $@

lint: .venv-test/.installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/python .ci/size.py
	cd "$$(mktemp -d)"; trap 'rm -rf "$$PWD"' EXIT; env -u PYTHONPATH \
	"$(ROOT)/.venv-test/bin/lint-imports" --config "$(ROOT)/pyproject.toml" --no-cache

types: .venv-test/.installed
	$(call outside,.venv-test,mypy --config-file "$(ROOT)/pyproject.toml" \
	--cache-dir "$(ROOT)/.venv-test/mypy_cache")

# Of the checkout: mkdocs reads docstrings and commands, for which it needs neither torch nor a wheel.
# Any warning fails it; docs/site_links.py checks every link. Material announces its successor at
# each start, which is no warning about these pages.
docs: .venv-docs/.ready
	PYTHONPATH="$(ROOT)" NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

# The wheel is made from the sdist, so both are complete where the wheel is.
# A test that changed needs a new sdist, but no new installation.
dist: dist/.built
	test -z "$$(find tests examples benchmarks -type f -newer dist/.built ! -name '*.pyc')" || \
	{ rm dist/.built; $(MAKE) dist/.built; }
dist/.built: .venv-build/.ready pyproject.toml MANIFEST.in LICENSE README.md $(SOURCES) $(DOCS)
	rm -rf dist ucudnn.egg-info
	.venv-build/bin/python -m build --no-isolation . >/dev/null
	.venv-build/bin/python .ci/check_dist.py dist
	touch $@

.venv-test/.ready: .venv-bare/.ready
.venv-test/.installed: .venv-bare/.installed
%/.ready: constraints.txt
	$(PYTHON) -m venv $*
	$(if $(filter .venv-test,$*),cd $* && for folder in lib/python*/site-packages; do \
	echo "../../../../.venv-bare/$$folder" > "$$folder/bare.pth"; done)
	$(if $(TORCH),$*/bin/python $(PIP) $(TORCH))
	$(if $(TOOLS$*),$*/bin/python $(PIP) $(TOOLS$*))
	touch $@

%/.installed: %/.ready dist/.built
	$*/bin/python -m pip --disable-pip-version-check uninstall -qq --yes ucudnn
	$*/bin/python $(PIP) "$$(echo dist/*.whl)$(EXTRAS$*)"
	touch $@

clean:
	rm -rf .venv .venv-test .venv-bare .venv-build .venv-docs build dist ucudnn.egg-info
	rm -rf .cudnn .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
