#!/usr/bin/env bash
# Install Slurm and munge from the distribution, if they are missing: root and Debian or Ubuntu are needed. Nothing is configured or
# started: tests/slurm/cluster.py brings its own configuration, keys and ports. Ends with 3 and the reason where it cannot.
set -euo pipefail

have() { command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null && command -v munged >/dev/null; }
if have; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
    echo "slurm-wlm and munge are not installed, and installing them needs root" >&2
    exit 3
fi
if ! command -v apt-get >/dev/null; then
    echo "slurm-wlm and munge are not installed, and there is no apt-get to install them" >&2
    exit 3
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
# The packages would start services of their own on the default ports; invoke-rc.d asks policy-rc.d, which says no.
policy=/usr/sbin/policy-rc.d
made=""
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    made=$policy
fi
status=0
{ apt-get -o DPkg::Lock::Timeout=600 update -qq && apt-get -o DPkg::Lock::Timeout=600 install -y -qq --no-install-recommends slurm-wlm munge; } \
    >"$log" 2>&1 || status=$?
if [ -n "$made" ]; then rm -f "$made"; fi
if [ "$status" != 0 ] || ! have; then
    tail -n 5 "$log" >&2
    echo "apt-get could not install slurm-wlm and munge" >&2
    exit 3
fi
rm -f "$log"
