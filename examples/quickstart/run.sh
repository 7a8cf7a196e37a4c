#!/usr/bin/env bash
# Train a small Qwen3 with DAPO on this machine, no GPU: two Megatron ranks, one FP8 engine, a refit every step.
# Arguments are passed on, e.g. `bash examples/quickstart/run.sh run.steps=10`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=requirements/setup.sh
source "$root/requirements/setup.sh"
setup_environment "$root"
echo "== training examples/quickstart/recipe.yaml into runs/quickstart (replacing an earlier run there)"
.venv/bin/trt-rl train examples/quickstart/recipe.yaml --overwrite "$@"
echo "== done: runs/quickstart/progress.png shows the reward, runs/quickstart/rollouts/ what was sampled"
