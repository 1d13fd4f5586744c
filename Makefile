# The house's commands. `make demo` and `make test` work first on a bare machine: they create .venv themselves.
# Options: ARGS="..." is passed to the command that runs; PYTHON=/path/to/python3 chooses the interpreter of .venv.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.installed
COMPILED := build/compiled
# Two processes share the tests; ARGS="-n 0" runs them in one, ARGS="-n 8" in eight. OpenMP threads of both would only spin.
IN_PARALLEL := -n 2 --dist worksteal
test test-compiled fuzz-ledger: export OMP_NUM_THREADS ?= 1
COMPILED_TESTS := $(wildcard tests/policies tests/tiering/ledger tests/cases) $(wildcard tests/tiering/test_manager_b[al]*.py tests/tiering/test_manager_r[eu]*.py) \
	$(wildcard tests/kernels/test_append*.py tests/kernels/test_places.py tests/kernels/test_fused_write.py tests/kernels/test_host_copy.py) \
	$(wildcard tests/io/test_copiers.py tests/io/test_piece_copier.py tests/io/test_page_copier.py)

.PHONY: venv demo test types lint compiled compiled-anew test-compiled bench bench-ledger fuzz-ledger soak reference test-gpu sanitize-gpu test-vllm wheel clean

venv: $(READY)

$(READY): pyproject.toml constraints-cpu.txt scripts/make_venv.sh
	@echo "Preparing $(VENV) (once, a few minutes: torch is large) ..."
	@VENV="$(VENV)" PYTHON="$(PYTHON)" scripts/make_venv.sh

demo: $(READY)
	@$(BIN)/kvtier demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/python scripts/stage.py
	cd build/typed && $(BIN)/mypy --config-file ../../pyproject.toml -p kvtier

# Both wheels: one with the pure rooms and the module in C as extension modules for this Python and platform (needs a C compiler), and
# one of Python alone, which runs everywhere. Everything else in them is the same.
wheel: $(READY)
	rm -rf dist build/lib* build/bdist*
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build/lib* build/bdist*
	KVTIER_COMPILE=1 $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*-none-any.whl dist/*-cp*.whl

# The compiled wheel, unpacked: made again when a file that goes into it, or the interpreter, is another one than when that was begun.
FINGERPRINT = { find bench io kernels policies pools tiering src -name __pycache__ -prune -o -type f -print0 | LC_ALL=C sort -z | \
	xargs -0 sha256sum setup.py pyproject.toml MANIFEST.in scripts/stage.py && $(BIN)/python -VV; } | sha256sum
compiled: $(READY)
	@made_of="$$($(FINGERPRINT))"; [ "$$made_of" = "$$(cat $(COMPILED)/.made-of 2>/dev/null || echo nothing)" ] || \
		$(MAKE) --no-print-directory compiled-anew MADE_OF="$$made_of"

compiled-anew: wheel
	rm -rf $(COMPILED)
	$(BIN)/python -m pip install --quiet --no-deps --target $(COMPILED) dist/*-cp*.whl
	@echo "$(MADE_OF)" >$(COMPILED)/.made-of

test-compiled: compiled
	PYTHONPATH=$(COMPILED) $(BIN)/python scripts/check_compiled.py $(COMPILED)
	PYTHONPATH=$(COMPILED) $(BIN)/python -m pytest $(or $(COMPILED_TESTS),$(error no tests of what is compiled)) $(IN_PARALLEL) $(ARGS)

# The ledger's figures, compiled. vLLM is measured beside where LEDGER_PYTHON's environment has it (same Python version as .venv's).
LEDGER_PYTHON ?= $(BIN)/python
bench-ledger: compiled
	PYTHONPATH=$(COMPILED) $(LEDGER_PYTHON) -m kvtier.cli bench ledger $(ARGS)

# Every benchmark that can be measured here, of the compiled build where one can be made. The short form: make bench ARGS="--quick"; against
# an earlier run: --compare OLD.json
HEADERS = $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))'
bench: $(READY)
	@if echo '#include <Python.h>' | cc -fsyntax-only -x c "-I$$($(HEADERS))" - 2>/dev/null; then \
		echo "make bench: of the compiled build; to make that takes a minute or two" && $(MAKE) --no-print-directory compiled; \
	else rm -rf $(COMPILED); echo "make bench: no C compiler, or no Python.h (python3-dev): the plain build is measured"; fi
	PYTHONPATH=$(abspath $(COMPILED)) $(BIN)/python -m kvtier.cli bench all $(ARGS)

# The random machine over the ledger of every layout, much longer than in the tests.
STEPS ?= 1000000
fuzz-ledger: $(READY)
	LEDGER_FUZZ_STEPS=$(STEPS) $(BIN)/python -m pytest tests/tiering/ledger/test_ledger_properties.py --timeout=0 $(IN_PARALLEL) $(ARGS)

# All faults mixed with real traffic, restarts and kills, every byte checked; prints a JSON summary.
MINUTES ?= 10
soak: $(READY)
	$(BIN)/python scripts/soak.py --minutes $(MINUTES) $(ARGS)

# The pages of docs/reference/, from the code.
reference: $(READY)
	PYTHONPATH="$$($(BIN)/python scripts/stage.py)" $(BIN)/python scripts/reference.py

# For a machine with a GPU that has torch, triton and cupy already; installs nothing, so it takes the system's Python.
HAS_TESTED := import sys; from importlib.util import find_spec; sys.exit(not (find_spec("pytest") and find_spec("torch")))
test-gpu:
	@$(PYTHON) -c '$(HAS_TESTED)' || { echo "make test-gpu: $(PYTHON) has no pytest or no torch, and nothing is installed here: activate an" \
		"environment that has both, and CuPy, or name its interpreter, make test-gpu PYTHON=.venv/bin/python" >&2; exit 2; }
	PYTHONPATH="$$($(PYTHON) scripts/stage.py)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) scripts/test_gpu.py $(ARGS)

# The tests of kernels and copies under compute-sanitizer, there; ARGS=racecheck (memcheck, initcheck, synccheck) chooses the tool.
sanitize-gpu:
	PYTHON=$(PYTHON) scripts/sanitize_gpu.sh $(ARGS)

# The vLLM adapter in the real vLLM, on the CPU, in an environment of its own (made once: minutes, 3.5 GB).
# The short form: make test-vllm ARGS='-m "vllm and not slow"'
VLLM_VENV ?= .venv-vllm
$(VLLM_VENV)/.installed: scripts/make_vllm_venv.sh
	@echo "Preparing $(VLLM_VENV) (once, a few minutes: vLLM is large) ..."
	@VLLM_VENV="$(VLLM_VENV)" PYTHON="$(PYTHON)" scripts/make_vllm_venv.sh

test-vllm: $(VLLM_VENV)/.installed
	$(abspath $(VLLM_VENV))/bin/python -m pytest tests/vllm -m vllm $(ARGS)

clean:
	rm -rf build dist *.egg-info
