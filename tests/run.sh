#!/usr/bin/env bash
# Run the CPU test suite. Arguments are passed on to pytest, e.g. `bash tests/run.sh -k engine -x`.
# `bash tests/run.sh --vllm` runs the engine contract and a short training run with vLLM's CPU build instead.
# `bash tests/run.sh --trtllm` runs the engine contract against every release that TensorRT-LLM's contract fake imitates.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=requirements/setup.sh
source "$root/requirements/setup.sh"
if [ "${1:-}" = "--vllm" ]; then
    shift
    setup_vllm_environment "$root"
    echo "== pytest tests/contracts -k vllm $*"
    exec .venv-vllm/bin/python -m pytest tests/contracts -k vllm "$@"
fi
setup_environment "$root"
if [ "${1:-}" = "--trtllm" ]; then
    shift
    echo "== pytest tests/contracts -m trtllm --all-releases $*"
    exec .venv/bin/python -m pytest tests/contracts -m trtllm --all-releases "$@"
fi
echo "== pytest tests/cpu tests/contracts $*"
exec .venv/bin/python -m pytest tests/cpu tests/contracts "$@"
