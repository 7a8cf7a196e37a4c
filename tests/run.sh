#!/usr/bin/env bash
# Run the whole CPU test suite. Arguments are passed on to pytest, e.g. `bash tests/run.sh -k engine -x`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=requirements/setup.sh
source "$root/requirements/setup.sh"
setup_environment "$root"
echo "== pytest tests/cpu $*"
exec .venv/bin/python -m pytest tests/cpu "$@"
