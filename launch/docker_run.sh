#!/usr/bin/env bash
# Run trt-rl in a container on this machine:
#
#   bash launch/docker_run.sh [OPTIONS] train RECIPE [OVERRIDES...]
#
# Every other command of trt-rl, and every program of the image, works too. Paths are those of the folder you stand in:
# its runs/ is written with your user and group; the recipe, its model folder, its data files (.jsonl, .parquet) and what
# --mount names are read. For functions of your own (reward.function): --mount FOLDER --env PYTHONPATH=FOLDER.
#
#   --image IMAGE     (trt_rl, as docker/README.md builds it; TRT_RL_IMAGE sets it as well)
#   --cpus-only       no GPUs
#   --gpus SET        as docker's: all (the default), 4, or '"device=0,1"'
#   --mount FOLDER    also visible in the container, under its own path, read-only; FOLDER:rw can be written; repeatable
#   --env NAME[=V]    set or pass on a variable; repeatable. NCCL_*, GLOO_*, HF_TOKEN and HF_HUB_OFFLINE are passed on anyway
#   --shm-size SIZE   shared memory of the container's own, in place of the host's (--ipc=host)
#   --host-network    the host's network in place of docker's
#   --dry-run         print the command and do nothing; docker is not needed
set -euo pipefail

image=${TRT_RL_IMAGE:-trt_rl} gpus=all shm="" network=no dry_run=no
mounts=() passed=() problems=()
inside=/workspace # where the image keeps trt_rl and its examples

fail() { echo "error: $*" >&2; exit 2; }
value() { if [ $# -lt 2 ] || [ -z "$2" ]; then fail "$1 needs a value; bash launch/docker_run.sh --help"; fi; }

while [ $# -gt 0 ]; do
    case $1 in
        --image) value "$@"; image=$2; shift 2 ;;
        --gpus) value "$@"; gpus=$2; shift 2 ;;
        --cpus-only) gpus=""; shift ;;
        --mount) value "$@"; mounts+=("$2"); shift 2 ;;
        --env) value "$@"; passed+=("$2"); shift 2 ;;
        --shm-size) value "$@"; shm=$2; shift 2 ;;
        --host-network) network=yes; shift ;;
        --dry-run) dry_run=yes; shift ;;
        --help | -h) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --) shift; break ;;
        -*) fail "unknown option $1; options of trt-rl come after its command; bash launch/docker_run.sh --help" ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || fail "what to run is missing, e.g. bash launch/docker_run.sh train examples/quickstart/recipe.yaml"

# --- folders that the container needs --------------------------------------------------------------------------------

volumes=() seen=()

# share HOST TARGET [ro]: docker's --mount takes any path but one with a comma; its --volume none with a colon.
share() {
    local source target=$2 mode=${3:-}
    source=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
    case $source$target in *,*) problems+=("$1: docker cannot mount a path with a comma; use another folder"); return ;; esac
    for known in "${seen[@]}"; do
        [ "$known" != "$target" ] || return 0
    done
    seen+=("$target")
    volumes+=(--mount "type=bind,source=$source,target=$target${mode:+,readonly}")
}

# The path that the container uses for a path given here: relative ones start at the folder you stand in.
seen_as() { case $1 in /*) echo "$1" ;; *) echo "$inside/${1#./}" ;; esac; }

# key_of BLOCK KEY FILE: the value of a plain `KEY: value` in a block of a recipe; nothing if it is written in another way.
key_of() {
    awk -v block="$1:" -v key="$2:" '/^[^ #]/ { in_block = ($1 == block) } in_block && $1 == key { $1 = ""; sub(/^ +/, ""); sub(/ +#.*/, ""); gsub(/^["\x27]|["\x27]$/, ""); print; exit }' "$3"
}

# data_of FILE: its data files, written as plain `source: NAME`.
data_of() { sed -nE "s/^[[:space:]]*source:[[:space:]]*[\"']?([^\"'#]*\.(jsonl|parquet))[\"']?[[:space:]]*(#.*)?\$/\1/p" "$1"; }

# give KEY PATH TEST WORD HINT: let the container read it, or note what is wrong with it.
give() {
    local key=$1 path=$2 test=$3 word=$4 hint=$5
    if ! test "$test" "$path"; then
        problems+=("$key = $path is no $word here; $hint")
    elif leaves_folder "$path"; then
        problems+=("$key = $path leaves the folder you stand in; give its absolute path")
    else
        share "$path" "$(seen_as "$path")" ro
    fi
}

leaves_folder() { case /$1/ in */../*) return 0 ;; *) return 1 ;; esac; }

recipe="" previous="" model="" run_folder="" data=()
case $1 in
    train | plan) for word in "${@:2}"; do case $word in *.yaml | *.yml) recipe=$word; break ;; esac; done
        [ -n "$recipe" ] || problems+=("$1 needs a recipe, a .yaml file such as examples/quickstart/recipe.yaml") ;;
esac
for word in "$@"; do
    [ "$previous" != --recipe ] || recipe=$word
    case $word in
        --recipe=*) recipe=${word#*=} ;;
        model.path=*) model=${word#*=} ;;
        data.*.source=*.jsonl | data.*.source=*.parquet) data+=("${word#*=}") ;;
        run.folder=*) run_folder=${word#*=} ;;
    esac
    previous=$word
done

if [ -n "$recipe" ]; then
    give recipe "$recipe" -f file "recipes are YAML files such as examples/quickstart/recipe.yaml"
    if [ -f "$recipe" ]; then
        model=${model:-$(key_of model path "$recipe")}
        run_folder=${run_folder:-$(key_of run folder "$recipe")}
        replaced=${#data[@]}
        while IFS= read -r file; do # one that an override replaces may be missing
            if [ "$replaced" = 0 ] || [ -f "$file" ]; then data+=("$file"); fi
        done < <(data_of "$recipe")
    fi
fi
for file in "${data[@]}"; do
    give "data source" "$file" -f file "correct data.train.source or data.validation.source"
done
if [ -n "$model" ]; then
    give model.path "$model" -d folder "download the model first, or correct model.path in the recipe or as an override"
fi

for mount in "${mounts[@]}"; do
    folder=${mount%:rw}
    if [ ! -d "$folder" ]; then
        problems+=("--mount $mount: $folder is no folder here")
    else
        folder=$(cd "$folder" && pwd)
        if [ "$mount" = "${mount%:rw}" ]; then share "$folder" "$folder" ro; else share "$folder" "$folder"; fi
    fi
done

# In a Hugging Face cache a model's files are links to another folder, which the container needs as well.
if [ -n "$model" ] && [ -d "$model" ]; then
    while IFS= read -r link; do
        target=$(realpath -m -- "$link") reached=no folders=("$model")
        case $model in /*) folders+=("${mounts[@]%:rw}") ;; esac # a relative path has another place in the container
        for folder in "${folders[@]}"; do
            case $target in "$(realpath -m -- "$folder")"/*) reached=yes ;; esac
        done
        if [ "$reached" = no ]; then
            problems+=("model.path = $model: $(basename "$link") is a link to $target, which the container does not see; give the absolute path and --mount with a folder that holds both, or copy the model with: hf download NAME --local-dir FOLDER")
            break
        fi
    done < <(find "$model" -maxdepth 1 -type l)
fi

# A run that the container writes elsewhere would go with it.
if [ -n "$run_folder" ]; then
    kept=no
    case ${run_folder#./} in runs/*) kept=yes ;; esac
    for mount in "${mounts[@]}"; do
        case $mount in *:rw) case $run_folder/ in "$(realpath -s -- "${mount%:rw}")"/*) kept=yes ;; esac ;; esac
    done
    if [ "$kept" = no ] || leaves_folder "$run_folder"; then
        problems+=("run.folder = $run_folder would be lost with the container; use runs/NAME, or an absolute path below a folder given as --mount FOLDER:rw")
    fi
fi
if [ -e runs ] && { [ ! -d runs ] || [ ! -w runs ]; }; then
    problems+=("$PWD/runs is no folder that you can write, and runs go there; move it, or stand in another folder")
elif [ ! -e runs ] && [ ! -w . ]; then
    problems+=("$PWD/runs cannot be made, and runs go there; stand in a folder that you can write")
fi

if [ "$dry_run" = no ]; then
    if ! command -v docker >/dev/null; then
        problems+=("docker is not installed; see https://docs.docker.com/engine/install/, and for GPUs NVIDIA's container toolkit")
    elif ! answer=$(docker version --format '{{.Server.Version}}' 2>&1); then
        problems+=("docker does not answer: ${answer##*$'\n'}")
    elif ! docker image inspect "$image" >/dev/null 2>&1; then
        problems+=("image $image is not on this machine; build it with: docker build -t $image -f docker/Dockerfile .  (docker/README.md), or name another with --image")
    fi
fi

if [ ${#problems[@]} -gt 0 ]; then
    echo "error: nothing was started: ${#problems[@]} problem(s)" >&2
    printf '  - %s\n' "${problems[@]}" >&2
    exit 2
fi

# --- the command -----------------------------------------------------------------------------------------------------

[ "$dry_run" = yes ] || mkdir -p runs
share "$PWD/runs" "$inside/runs"

# --init reaps Ray's orphans; --stop-timeout leaves `docker stop` the time for a last step and its checkpoint.
command=(docker run --rm --init --stop-timeout 600 --user "$(id -u):$(id -g)")
if [ -t 0 ] && [ -t 1 ]; then command+=(--interactive --tty); fi
if [ -n "$gpus" ]; then command+=(--gpus "$gpus" --env "NVIDIA_DRIVER_CAPABILITIES=compute,utility"); fi
# NCCL and Ray's object store live in shared memory, of which docker gives 64 MiB; CUDA and NCCL pin memory.
if [ -n "$shm" ]; then command+=(--shm-size "$shm"); else command+=(--ipc=host); fi
command+=(--ulimit memlock=-1:-1 --ulimit stack=67108864:67108864 --ulimit nofile=65535:65535)
[ "$network" = no ] || command+=(--network host)
# By name: values, a token among them, stay out of the command line.
while IFS= read -r name; do command+=(--env "$name"); done < <(compgen -e | grep -E '^(NCCL_|GLOO_)|^(HF_TOKEN|HF_HUB_OFFLINE)$' || true)
for variable in "${passed[@]}"; do command+=(--env "$variable"); done
command+=("${volumes[@]}" "$image" "$@")

if [ "$dry_run" = yes ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
