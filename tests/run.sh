#!/usr/bin/env bash
# Run the CPU test suite. Arguments are passed on to pytest, e.g. `bash tests/run.sh -k engine -x`.
# `bash tests/run.sh --vllm` runs the engine contract and a short training run with vLLM's CPU build instead.
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
echo "== pytest tests/cpu tests/contracts $*"
exec .venv/bin/python -m pytest tests/cpu tests/contracts "$@"
