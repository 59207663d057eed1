# Two commands do everything: `make demo` and `make test`. Each sets up .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PURE := $(addprefix src/drumline/,core schedules plan report) tests/core tests/schedules tests/plan tests/report
KERNEL := src/drumline/core/kernel
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help kernel setup demo test quick style lint floors matrices faults faults-short bench docs clean

help:
	@echo "make demo    train a small model by several schedules on two ranks; ends with a report to open"
	@echo "make test    all checks and tests, PyTorch comparison included (about 14 minutes)"
	@echo "make quick   the checks and tests that need no torch (under a minute)"
	@echo "make floors  the tests with the lowest versions of PyTorch and all else that pyproject.toml admits"
	@echo "make matrices   every family of Hugging Face models, every schedule with all counts"
	@echo "make faults   kills, stops, damage and cut links in real runs, each resumed and compared (about 15 minutes)"
	@echo "make bench   the benchmarks beside their peers; prints tables, writes JSON to out/"
	@echo "make docs    the documentation as HTML in docs/_build"
	@echo "make setup   only the environment, .venv"
	@echo "make kernel  the simulator's C library, in the source tree; needs a C compiler and no environment"

# Without it, simulations run in Python with the same results: a compiler that is missing stops nothing here.
$(KERNEL)/kernel.stamp: $(wildcard $(KERNEL)/*.c $(KERNEL)/*.h) $(KERNEL)/build.py
	-@$(PYTHON) $(KERNEL)/build.py
	@touch $@

kernel:
	$(PYTHON) $(KERNEL)/build.py

# The package and the tools; torch comes on top of it where it is needed.
$(VENV)/base.stamp: pyproject.toml hatch_build.py constraints.txt | $(KERNEL)/kernel.stamp
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[dev]"
	@touch $@

# Other frameworks' config classes, which tests ask, stand beside it: each in a folder, without what it depends on.
$(VENV)/full.stamp: pyproject.toml hatch_build.py constraints.txt scripts/releases.py | $(KERNEL)/kernel.stamp
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[dev,train,hf,plan,viz,notebook,servetest,trainers,tunetest]"
	$(BIN)/python scripts/releases.py
	@touch $(VENV)/base.stamp $@

setup: $(VENV)/full.stamp

demo: $(VENV)/full.stamp
	$(BIN)/drumline demo --out out/demo

style: $(VENV)/base.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

# Types of the half that needs torch can only be checked where torch is, in a cache that `make lint` does not overwrite.
# They are checked beside the tests; FEW_CASES thins out what is drawn at random (tests/matrices.py), and compiled files
# are kept for the next run, whatever the environment says.
quick: export FEW_CASES := 1
quick: export PYTHONDONTWRITEBYTECODE :=
quick: style
	@$(BIN)/mypy --follow-imports=silent --cache-dir .mypy_cache/quick $(PURE) & types=$$!; \
	$(BIN)/pytest -m "not torch and not slow and not browser" --forks 2; tests=$$?; \
	wait $$types && exit $$tests

lint: $(VENV)/full.stamp style
	$(BIN)/mypy

# Docs are built and types checked beside the tests, then one feature is taken away in a copy of the tree, which mypy
# knows by then. The tests are collected once, while the docs and the types keep the other core busy, and then run in
# two processes (tests/forked_tests.py).
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/full.stamp style
	@$(MAKE) --no-print-directory docs & docs=$$!; \
	{ $(BIN)/mypy && $(BIN)/python benchmarks/removable.py moving --brief; } & types=$$!; \
	$(BIN)/pytest --forks 2; tests=$$?; \
	wait $$docs; built=$$?; wait $$types && exit $$((tests + built))

# The same tests with the lowest versions that pyproject.toml admits, in an environment of its own; what draws pages and
# checks types is left out. The client that asks services is told no version of grpcio: each asks for an older or a newer
# one than the floor. The lowest matplotlib calls what today's pyparsing warns of. On x86 this PyTorch brings gigabytes
# of CUDA.
floors:
	$(PYTHON) scripts/floors.py > .floors.txt
	$(PYTHON) -m venv .venv-floors
	.venv-floors/bin/python -m pip install --quiet --disable-pip-version-check --requirement .floors.txt
	.venv-floors/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "tritonclient<2.72" python-rapidjson
	.venv-floors/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	.venv-floors/bin/python scripts/floors.py --check
	.venv-floors/bin/pytest --forks 2 -m "not browser" \
	  -W ignore::pyparsing.warnings.PyparsingDeprecationWarning

# All combinations of what `make test` thins out (models, schedules, counts, transports), and the matrix of Hugging Face
# families and schedules for docs/models-tested.md and of adapters for docs/adapters-tested.md; an hour.
matrices: $(VENV)/full.stamp
	ALL_CASES=1 $(BIN)/pytest -m matrix --forks 2
	OMP_NUM_THREADS=1 $(BIN)/python tests/hf_matrix.py --write
	OMP_NUM_THREADS=1 $(BIN)/python tests/adapter_matrix.py --write

# Real runs of `drumline train` that are killed, stopped or damaged (tests/faults), and a service under faults; the short
# form is for .ci/run.
faults faults-short: export PYTHONPATH := src:tests
faults: $(VENV)/full.stamp
	@mkdir -p out
	$(BIN)/python tests/faults/run.py --json out/faults.json
	PYTHONPATH=src:tests $(BIN)/python benchmarks/serve_faults.py --json out/serve_faults.json
	PYTHONPATH=src:tests $(BIN)/python benchmarks/serve_replaced.py --json out/serve_replaced.json
	PYTHONPATH=src:tests $(BIN)/python benchmarks/serve_limits.py --json out/serve_limits.json
	PYTHONPATH=src:tests $(BIN)/python benchmarks/serve_soak.py --json out/serve_soak.json

faults-short: $(VENV)/full.stamp
	$(BIN)/python tests/faults/run.py --short

bench: $(VENV)/full.stamp
	@mkdir -p out
	PYTHONPATH=tests $(BIN)/python benchmarks/fuzz.py --json out/fuzz.json
	$(BIN)/python benchmarks/fuzz_mesh.py --cases 2000 --jobs 2 --json out/fuzz_mesh.json
	$(BIN)/python benchmarks/removable.py --json out/removable.json
	$(BIN)/python benchmarks/simulate.py --json out/simulate.json
	$(BIN)/python benchmarks/search.py --json out/search.json
	$(BIN)/python benchmarks/published.py --fit --json out/published.json
	$(BIN)/python benchmarks/expert_questions.py --json out/expert_questions.json
	PYTHONPATH=tests $(BIN)/python benchmarks/launch_files.py --json out/launch_files.json
	$(BIN)/python benchmarks/pictures.py --json out/pictures.json
	$(BIN)/python benchmarks/advice.py --json out/advice.json
	$(BIN)/python benchmarks/messages.py --json out/messages.json
	$(BIN)/python benchmarks/runtime_cpu.py --json out/runtime_cpu.json
	$(BIN)/python benchmarks/recording.py --json out/recording.json
	$(BIN)/python benchmarks/lengths.py --json out/lengths.json
	$(BIN)/python benchmarks/checks.py --json out/checks.json
	$(BIN)/python benchmarks/prediction.py --json out/prediction.json
	$(BIN)/python benchmarks/balance.py --json out/balance.json
	$(BIN)/python benchmarks/planner.py --json out/planner.json
	$(BIN)/python benchmarks/compile.py --json out/compile.json
	$(BIN)/python benchmarks/train_gpt.py --json out/train_gpt.json
	$(BIN)/python benchmarks/finetune_pair.py --json out/finetune_pair.json
	$(BIN)/python benchmarks/finetune_memory.py --small --layers 4 --tokens 64 --json out/finetune_memory.json
	$(BIN)/python benchmarks/saving.py --json out/saving.json
	$(BIN)/python benchmarks/soak.py --json out/soak.json
	PYTHONPATH=tests $(BIN)/python benchmarks/adapt.py --out out/adapt --json out/adapt.json
	$(BIN)/python benchmarks/experts_adapt.py --out out/adapt --json out/experts_adapt.json
	$(BIN)/python benchmarks/meshes.py --json out/meshes.json
	$(BIN)/python benchmarks/noflush.py --json out/noflush.json
	$(BIN)/python benchmarks/staleness.py --json out/staleness.json
	$(BIN)/python benchmarks/postval.py --json out/postval.json
	$(BIN)/python benchmarks/serve.py --json out/serve.json
	$(BIN)/python benchmarks/planted.py --json out/planted.json

# The API reference imports what it describes, PyTorch included.
docs: $(VENV)/full.stamp
	$(BIN)/sphinx-build --quiet --fail-on-warning docs docs/_build

clean:
	rm -rf $(VENV) .venv-floors .floors.txt out docs/_build $(KERNEL)/kernel.stamp $(KERNEL)/kernel-*.shared
