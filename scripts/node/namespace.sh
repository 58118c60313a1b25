#!/bin/sh
# The first process of a node's mount and pid namespaces: it mounts the node's own directories and waits. The mounts
# disappear with the namespace.
set -eu
home=$1 pause=$2

# unshare has made mounts private; mounts made here have to propagate to containers.
mount --make-rshared /
mount -t tmpfs tmpfs /run
mkdir /run/cdi /run/containerd /run/netns
mount --bind "$home/kubelet" /var/lib/kubelet

# /dev has the simulated GPUs as on a node with a driver, and not the machine's own.
mount -t tmpfs -o mode=755 tmpfs "$home/dev"
cp -ax /dev/. "$home/dev/"
rm -f "$home"/dev/nvidia*
for one in pts shm mqueue; do
  if mountpoint -q "/dev/$one"; then mkdir -p "$home/dev/$one"; mount --bind "/dev/$one" "$home/dev/$one"; fi
done
cp -a "$home"/driver/dev/nvidia* "$home/dev/"
mount --rbind "$home/dev" /dev

# kubelet and the CNI plugin would set these for the whole machine. They find these files with the wanted values.
for one in vm/overcommit_memory=1 kernel/panic=10 kernel/panic_on_oops=1 net/ipv4/ip_forward=1; do
  file=$home/state/$(basename "${one%=*}")
  echo "${one#*=}" > "$file"
  mount --bind "$file" "/proc/sys/${one%=*}"
done
mount --bind "$home/state/boot_id" /proc/sys/kernel/random/boot_id

: > "$home/state/mounted"
exec "$pause"
