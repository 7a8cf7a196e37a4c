#!/usr/bin/env bash
# Install Slurm, munge and an ssh server from the distribution, if they are missing: root and Debian or Ubuntu are needed. Nothing is
# configured or started: the tests bring their own configuration, keys and ports. Ends with 3 and the reason where it cannot.
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin
have() {
    local program
    for program in slurmctld slurmd sbatch munged sshd ssh; do
        command -v "$program" >/dev/null || return 1
    done
}
if have; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
    echo "Slurm, munge or sshd is not installed, and installing it needs root" >&2
    exit 3
fi
if ! command -v apt-get >/dev/null; then
    echo "Slurm, munge or sshd is not installed, and there is no apt-get to install it" >&2
    exit 3
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
# The packages would start services of their own on the default ports; invoke-rc.d asks policy-rc.d, which says no.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
install() {
    apt-get -o DPkg::Lock::Timeout=600 update -qq
    apt-get -o DPkg::Lock::Timeout=600 install -y -qq --no-install-recommends slurm-wlm munge openssh-server
}
status=0
(install) >"$log" 2>&1 || status=$?
if [ "$status" != 0 ] || ! have; then
    tail -n 5 "$log" >&2
    echo "apt-get could not install slurm-wlm, munge and openssh-server" >&2
    exit 3
fi
rm -f "$log"
