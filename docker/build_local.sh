#!/usr/bin/env bash
# Build the CPU image without a registry, and use it: a Debian base by debootstrap, docker/Dockerfile by buildah (no daemon,
# no namespaces: chroot isolation), `doctor`, and four steps of the quickstart through the entrypoint as the image's user.
#
#   sudo bash docker/build_local.sh [--tests 'tests/cpu -k route'] [--keep] [-- BUILDAH ARGUMENTS]
#
# --tests also builds the stage `test` with these arguments of pytest. --keep leaves the work folder, to be used again.
# WORK     where it happens: 6 GB, with --tests 12             (a new folder in /tmp)
# MIRROR   of Debian                                          (http://deb.debian.org/debian)
# WHEELS   folder of wheels that pip shall find, e.g. torch   (none)
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_CERT, TORCH_INDEX reach pip inside the build and are not in the image.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mirror=${MIRROR:-http://deb.debian.org/debian} suite=bookworm # has Python 3.11
tests="" keep=no extra=()

fail() { echo "error: $*" >&2; exit 1; }

while [ $# -gt 0 ]; do
    case $1 in
        --tests) [ $# -gt 1 ] || fail "--tests needs arguments of pytest, e.g. --tests 'tests/cpu -k route'"; tests=$2; shift 2 ;;
        --keep) keep=yes; shift ;;
        --) shift; extra=("$@"); break ;;
        *) fail "unknown argument $1; known: --tests ARGUMENTS, --keep, -- BUILDAH ARGUMENTS" ;;
    esac
done
lacking=()
for tool in debootstrap buildah; do
    command -v "$tool" >/dev/null || lacking+=("$tool")
done
[ ${#lacking[@]} -eq 0 ] || fail "not installed: ${lacking[*]}; on Debian and Ubuntu: apt-get install --no-install-recommends ${lacking[*]}"
[ "$(id -u)" -eq 0 ] || fail "debootstrap and chroot need root; run this with sudo"
if [ -n "${WHEELS:-}" ] && [ ! -d "$WHEELS" ]; then
    fail "WHEELS=$WHEELS is no folder"
fi

work=${WORK:-$(mktemp -d /tmp/trt_rl_image.XXXXXX)}
mkdir -p "$work"
# Only what this script made; --one-file-system, should debootstrap have left something mounted.
clean_up() { [ "$keep" = yes ] || rm -rf --one-file-system "$work"/{rootfs,storage,run}; }
trap clean_up EXIT

tool() { buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"; }

base=localhost/trt_rl_base:$suite image=localhost/trt_rl:cpu
if ! tool inspect --type image "$base" >/dev/null 2>&1; then
    echo "== debootstrap $suite from $mirror"
    rm -rf --one-file-system "$work/rootfs"
    debootstrap --variant=minbase --include=python3-venv,python3-dev,gcc,libc6-dev,ca-certificates "$suite" "$work/rootfs" "$mirror" \
        >"$work/debootstrap.log" 2>&1 || { tail -20 "$work/debootstrap.log" >&2; fail "debootstrap failed; its last lines are above"; }
    rm -rf "$work"/rootfs/var/cache/apt/archives/*.deb "$work"/rootfs/var/lib/apt/lists/*
    from=$(tool from scratch)
    tool add -q "$from" "$work/rootfs" / >/dev/null
    tool commit -q --rm "$from" "$base" >/dev/null
    rm -rf --one-file-system "$work/rootfs"
fi

arguments=(--isolation chroot --network host --format docker --build-arg "BASE=$base")
arguments+=(--build-arg "REVISION=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)")
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL TORCH_INDEX; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done
if [ -n "${PIP_CERT:-}" ]; then
    arguments+=(--volume "$PIP_CERT:/run/pip.crt:ro" --build-arg PIP_CERT=/run/pip.crt)
fi
if [ -n "${WHEELS:-}" ]; then
    arguments+=(--volume "$WHEELS:/run/wheels:ro" --build-arg PIP_FIND_LINKS=/run/wheels)
fi
build() { tool bud "${arguments[@]}" "${extra[@]}" "$@" -f "$root/docker/Dockerfile" "$root"; }

echo "== building $image from docker/Dockerfile"
build --target image -t "$image"
if [ -n "$tests" ]; then
    echo "== building its stage test: pytest $tests"
    build --target test --build-arg "TESTS=$tests" -t localhost/trt_rl:test
fi

container=$(tool from "$image")
# buildah run does not use the image's entrypoint; take it from the image, so that what runs is what docker would run.
mapfile -t entrypoint < <(tool inspect --type image --format '{{range .Docker.Config.Entrypoint}}{{println .}}{{end}}' "$image" | sed '/^$/d')
[ ${#entrypoint[@]} -gt 0 ] || fail "$image has no entrypoint"
inside() { tool run --isolation chroot --network host "$@"; }

echo "== in the image: who runs, and what the entrypoint leaves of a launcher's variables"
inside --env PMI_RANK=0 --env SLURM_JOB_ID=7 "$container" -- "${entrypoint[@]}" bash -c 'id; env | grep -E "^(PMI|SLURM)" || echo "no PMI or SLURM variables"'
echo "== in the image: trt-rl doctor --quick (its health check)"
inside "$container" -- "${entrypoint[@]}" doctor --quick
echo "== in the image: doctor as a user that it does not know"
inside --user 4242:4242 "$container" -- "${entrypoint[@]}" doctor --quick | tail -1
echo "== in the image: the quickstart, 4 steps"
inside "$container" -- "${entrypoint[@]}" train examples/quickstart/recipe.yaml run.steps=4
tool rm "$container" >/dev/null
tool inspect --type image --format 'health check: {{.Docker.Config.Healthcheck.Test}}; user: {{.Docker.Config.User}}; command: {{.Docker.Config.Cmd}}{{println}}' "$image"
echo "== done: $image was built and trained"
[ "$keep" = no ] || echo "kept: buildah --storage-driver vfs --root $work/storage --runroot $work/run images"
