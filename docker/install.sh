#!/usr/bin/env bash
# Run by docker/Dockerfile while it builds: /opt/trt_rl, an environment with what trt_rl needs.
# On a TensorRT-LLM image it lies over the image's own packages; on any other image it holds everything, for CPUs.
set -euo pipefail
venv=/opt/trt_rl requirements=requirements
unset PIP_CONSTRAINT # as in the Dockerfile

fail() { echo "error: $*" >&2; exit 1; }

python=""
for candidate in python3 python3.12 python3.11; do
    if type -P "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "the base image has no Python 3.11 or 3.12; choose another with --build-arg BASE=..."
kind=$("$python" docker/base_packages.py kind)
echo "== the base image is of kind $kind, with $("$python" --version)"

if [ "$kind" = trtllm ]; then
    "$python" -m venv --system-site-packages --without-pip "$venv" # pip is the base's
    "$venv"/bin/python docker/base_packages.py write $requirements/docker.txt /tmp
    "$venv"/bin/python -m pip install --no-cache-dir --no-build-isolation -r /tmp/requirements.txt -c /tmp/constraints.txt
    # The ranges of setup.py, which the base mostly meets. trt_rl itself is still an empty folder here.
    "$venv"/bin/python -m pip install --no-cache-dir --no-build-isolation -r /tmp/requirements.txt -c /tmp/constraints.txt '.[train]'
    "$venv"/bin/python docker/base_packages.py check /tmp/constraints.txt
else
    "$python" -m venv "$venv" || fail "$python -m venv failed; the base image needs python3-venv"
    torch=$(grep -m1 '^torch==' $requirements/cpu.txt)
    "$venv"/bin/python -m pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "$torch"
    "$venv"/bin/python -m pip install --no-cache-dir -r $requirements/cpu.txt
    "$venv"/bin/python -c 'import torch; assert torch.version.cuda is None, f"{torch.__version__} is not the CPU build"'
fi
