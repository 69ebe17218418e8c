#!/bin/bash
# Runs a command where Slurm is that of a later Debian (trixie has 24.11, sid 26.05), for the tests in this folder:
#
#     tests/slurm/other_slurm.sh trixie .venv/bin/python -m pytest -n2 tests/slurm
#
# As root, with debootstrap, and MariaDB for the tests of accounting (24.11 does not start with that of trixie).
# The Debian stays in ROOTS. The command sees this machine's files, processes and networks.
set -eu
suite=$1
shift
root=${ROOTS:-/var/cache/hpc_parallel}/$suite
if [ ! -e "$root/ready" ]; then
    packages=slurm-wlm,slurmdbd,slurm-wlm-mysql-plugin,munge,iproute2,procps,git,openmpi-bin,shellcheck,kmod
    debootstrap --variant=minbase --include="$packages" "$suite" "$root"
    for program in mariadbd mariadb-install-db mariadb-admin; do
        printf '#!/bin/sh\nexec chroot /host %s "$@"\n' "$(command -v $program || echo false)" > "$root/usr/local/sbin/$program"
        chmod +x "$root/usr/local/sbin/$program"
    done
    touch "$root/etc/hosts" "$root/ready"
fi
export root here="$PWD"
# shellcheck disable=SC2016
exec unshare --mount bash -euc '
mount --make-rprivate /
mount --bind "$root" "$root"
python=$(dirname "$(readlink -f "$here/.venv/bin/python")")  # may be outside of /usr
for folder in "$here" "${python%/bin}" /tmp /dev /sys /proc; do
    case $folder in /usr | /usr/*) continue ;; esac
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
mkdir -p "$root/host" "$root/old"
mount --rbind / "$root/host"
cd "$root"
pivot_root . old
umount -l /old
cd "$here"
exec env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"' bash "$@"
