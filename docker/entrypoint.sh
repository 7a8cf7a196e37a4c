#!/usr/bin/env bash
# First process of the container: removes what an MPI launcher or Slurm left in the environment, raises limits, and becomes
# the command. `docker run IMAGE train RECIPE` runs `trt-rl train RECIPE`; a program on PATH (`bash`, `python`) runs as itself.
set -euo pipefail

say() { echo "entrypoint: $*" >&2; }

# raise OPTION WANTED NAME FLAG: the soft limit up to WANTED, as far as the hard limit lets it.
raise() {
    local option=$1 wanted=$2 name=$3 flag=$4 soft hard target
    soft=$(ulimit -S "$option")
    [ "$soft" = unlimited ] && return
    [ "$wanted" != unlimited ] && [ "$soft" -ge "$wanted" ] && return
    hard=$(ulimit -H "$option")
    target=$wanted
    if [ "$hard" != unlimited ] && { [ "$wanted" = unlimited ] || [ "$hard" -lt "$wanted" ]; }; then
        ulimit -H "$option" "$wanted" 2>/dev/null || target=$hard # only a privileged user may raise it
    fi
    ulimit -S "$option" "$target" 2>/dev/null || target=$soft
    if [ "$target" != "$wanted" ]; then
        say "$name stays at $target, $wanted is better; raise it with: docker run --ulimit $flag"
    fi
}

raise -n 65535 "open files" nofile=65535:65535
raise -l unlimited "locked memory (KiB)" memlock=-1:-1
raise -s 65536 "stack (KiB)" stack=67108864:67108864

# PMI* holds PMIX* too. `env -u` and not `unset`: a name that is no shell identifier is removed too, and values may hold newlines.
drop=()
while IFS= read -r -d '' pair; do
    name=${pair%%=*}
    case $name in
        PMI* | MPI* | OMPI* | SLURM*) drop+=(-u "$name") ;;
    esac
done < <(env -0)
if [ ${#drop[@]} -gt 0 ]; then
    say "removed $((${#drop[@]} / 2)) variables of an MPI launcher or Slurm"
fi

if [ $# -eq 0 ] || ! type -P -- "$1" >/dev/null; then
    set -- trt-rl "$@"
fi
exec env "${drop[@]}" "$@"
