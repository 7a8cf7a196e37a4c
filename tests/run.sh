#!/usr/bin/env bash
# Run the CPU test suite. Arguments are passed on to pytest, e.g. `bash tests/run.sh -k engine -x`.
# `bash tests/run.sh --vllm` runs the engine contract and a short training run with vLLM's CPU build instead.
# `bash tests/run.sh --engines` runs all of tests/contracts: every release of TensorRT-LLM and the SGLang that are imitated there.
# `bash tests/run.sh --slurm` launches runs in a real Slurm of two nodes on this machine and over a real sshd; as root it installs what is missing.
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
if [ "${1:-}" = "--engines" ]; then
    shift
    echo "== pytest tests/contracts --all-engines $*"
    imitation=tests/contracts/test_trtllm_fake.py # has a Ray cluster of its own, with GPUs that are numbers only
    .venv/bin/python -m pytest tests/contracts --all-engines --ignore "$imitation" "$@"
    exec .venv/bin/python -m pytest "$imitation" --all-engines
fi
if [ "${1:-}" = "--slurm" ]; then
    shift
    bash tests/slurm/setup.sh || echo "== tests/slurm will be skipped, for the reason above" >&2
    echo "== pytest tests/slurm $*"
    exec .venv/bin/python -m pytest tests/slurm --long "$@"
fi
echo "== pytest tests/cpu tests/contracts tests/slurm $*"
bash tests/slurm/setup.sh || echo "== tests/slurm will be skipped, for the reason above" >&2
exec .venv/bin/python -m pytest tests/cpu tests/contracts tests/slurm "$@"
