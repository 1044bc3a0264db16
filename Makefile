# Every command installs what it needs into VENV; nothing is installed by hand.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
# Else each of the many processes of the tests would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Processes of tests: one more than two cores, for tests wait for children, disks and deadlines too.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The oldest torch, as ftrain itself names it, in an environment of its own.
OLD := $(VENV)-oldest
OLD_TORCH := torch==$(shell sed -n 's/^TESTED = (\([0-9]*\), \([0-9]*\)).*/\1.\2.0/p' ftrain/_torch/__init__.py)
OLD_TESTS := $(addprefix tests/,$(addprefix transforms/compile/test_,lowered.py graph_passes.py evaluation.py checks_of_values.py compiled_blocks.py) \
	tree/test_fast_flatten.py \
	$(addprefix transforms/remat/test_,recomputed_gradients.py recomputed_memory.py recomputed_errors.py torch_checkpoint.py) \
	test_types.py test_versions.py data/test_workers.py random/test_draws_in_every_mode.py::test_dynamic_shapes \
	laws/test_compiled.py::test_a_split_step_does_not_lose_the_gradient_of_a_gradient)

# Ranks as threads of one process: what they trace at once would disturb the compiled steps of other tests.
RANK_TESTS := tests/parallel tests/profiling/test_planning.py

# What a CPU without AVX-512 runs. There bfloat16 and float16 are emulated, and kernels are others.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 TORCHINDUCTOR_CPP_SIMDLEN=256
CPU_TESTS := $(addprefix tests/,backends/test_emulated.py \
	step/test_evaluate_16_bits.py transforms/test_matmul_precision.py \
	$(addprefix transforms/amp/test_,loss_scale.py amp_dtypes.py overflow_counts.py overflow_report.py watched_parts.py) \
	golden parity/test_low_precision*.py parity/test_loop*.py backends/test_doctor.py)

# What needs a GPU. The first file lets the tests see it; they take turns on it.
GPU_TESTS := $(addprefix tests/,test_cuda.py random/test_draws_in_every_mode.py::test_gpu_draws_the_same_bits data/test_prefetch.py \
	$(addprefix backends/test_registry.py::test_,the_record_of_cuda_works \
	a_step_on_cuda_reads_nothing_and_agrees_with_the_cpu))

.PHONY: train test test-all test-oldest test-avx2 test-gpu faults lint format bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: $(READY)  ## Train a byte-level GPT on Python's own standard library (ARGS="--help" lists the options).
	$(BIN)/python examples/train_lm.py $(ARGS)

test: $(READY)  ## Run the tests, the doctests and the code blocks of the documentation.
	$(PYTEST) $(RANK_TESTS:%=--ignore=%) $(ARGS)
	$(PYTEST) $(RANK_TESTS)

test-all: $(READY)  ## Run the same, and the tests that are marked as exhaustive: more cases of what the others prove.
	$(PYTEST) -m '' $(RANK_TESTS:%=--ignore=%) $(ARGS)
	$(PYTEST) -m '' $(RANK_TESTS)

$(OLD)/.ready: pyproject.toml constraints.txt ftrain/_torch/__init__.py
	rm -f $@
	$(PYTHON) -m venv $(OLD)
	grep -v '^torch' constraints.txt > $(OLD)/constraints.txt
	$(OLD)/bin/pip install --quiet --disable-pip-version-check --retries 1 -c $(OLD)/constraints.txt \
		'$(OLD_TORCH)' -e . pytest pytest-xdist hypothesis \
		&& touch $@ || echo "test-oldest: not run, for $(OLD_TORCH) cannot be installed here"

test-oldest: $(OLD)/.ready  ## Run some of the tests with the oldest torch (a download of 3 GB), if it can be had.
	if [ -e $(OLD)/.ready ]; then $(OLD)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(OLD_TESTS) $(ARGS); fi

test-avx2: $(READY)  ## Run the tests that depend on the CPU as on one without AVX-512, in about a minute.
	$(AVX2) $(PYTEST) $(CPU_TESTS) $(ARGS)

test-gpu: $(READY)  ## Run the tests that need an NVIDIA or AMD GPU; the others do not see one.
	$(BIN)/python -m pytest -rs $(GPU_TESTS) $(ARGS)

faults: $(READY)  ## Kill, crash, fill, flip and fuzz as often as the table of faults says; takes hours.
	FTRAIN_FAULTS=full $(BIN)/python -m pytest -m '' tests/faults/test_paths.py
	FTRAIN_FAULTS=full $(PYTEST) -m '' --ignore=tests/faults/test_paths.py tests/faults $(ARGS)

lint: $(READY)  ## Check format, style and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)  ## Rewrite the files as `make lint` wants them.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Measure a step beside the loops and libraries that it replaces (ARGS="--help" lists the options).
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]' -r bench/peers.txt
	$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) $(OLD) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
