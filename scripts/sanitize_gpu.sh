#!/usr/bin/env bash
# The tests of the GPU's kernels and copies under compute-sanitizer: reads and writes outside of what was allocated, and races in shared
# memory. Needs what make test-gpu needs, and compute-sanitizer, which comes with CUDA.
#
#   scripts/sanitize_gpu.sh [memcheck|racecheck|initcheck|synccheck] [arguments of pytest]
#
# Exit codes: 0 fine; 1 a test failed; 2 it cannot run here; 3 the sanitizer found something.
set -euo pipefail
cd "$(dirname "$0")/.."
tool=memcheck
case "${1:-}" in memcheck|racecheck|initcheck|synccheck) tool=$1; shift;; esac
if ! command -v compute-sanitizer >/dev/null; then
    echo "scripts/sanitize_gpu.sh: compute-sanitizer is not on the PATH; it is in the folder of CUDA, beside nvcc" >&2
    exit 2
fi
python=${PYTHON:-python3}
if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "scripts/sanitize_gpu.sh: torch sees no GPU; run it on a machine with one (nvidia-smi shows what the driver sees)" >&2
    exit 2
fi
PYTHONPATH="$("$python" scripts/stage.py)${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
# Each tensor an allocation of its own, and memcheck's padding behind it: in torch's large blocks, and of neighbouring allocations too, the
# byte behind one belongs to the next. No graph can be captured so, and what waits on purpose, or takes gigabytes, has nothing to find here.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
memory=()
if [ "$tool" = memcheck ]; then memory=(--padding 65536 --report-api-errors no); fi  # tests make calls that CUDA refuses
# By itself it waits ten seconds for the first call of CUDA, which comes after the imports, and then lets the tests run unwatched.
exec compute-sanitizer --tool "$tool" "${memory[@]}" --launch-timeout 0 --target-processes application-only --error-exitcode 3 \
    "$python" -m pytest -m gpu -q -rs -p no:cacheprovider -k "not captured and not beyond and not the_engine" \
    tests/gpu/test_gpu_kernels.py tests/gpu/test_gpu_kernels_write.py tests/gpu/test_gpu_attention.py tests/gpu/test_gpu_direct_rows.py \
    tests/gpu/test_gpu_copies.py tests/gpu/test_gpu_copy_paths.py tests/gpu/test_gpu_sections.py "$@"
