#!/bin/sh
# The first process of a node's mount and pid namespaces: it mounts what is the node's own and waits. All that it mounts
# goes with the namespace.
set -eu
home=$1 pause=$2

# unshare has cut the way to the machine's mounts; from here to the containers' there has to be one.
mount --make-rshared /
mount -t tmpfs tmpfs /run
mkdir /run/cdi /run/containerd /run/netns
mount --bind "$home/kubelet" /var/lib/kubelet

# The GPUs are in /dev as on a node with a driver, and the machine's own are not.
mount -t tmpfs -o mode=755 tmpfs "$home/dev"
cp -ax /dev/. "$home/dev/"
rm -f "$home"/dev/nvidia*
for one in pts shm mqueue; do
  if mountpoint -q "/dev/$one"; then mkdir -p "$home/dev/$one"; mount --bind "/dev/$one" "$home/dev/$one"; fi
done
cp -a "$home"/driver/dev/nvidia* "$home/dev/"
mount --rbind "$home/dev" /dev

# kubelet and the CNI plugin set these for the whole machine, unless they find them set. They find these files.
for one in vm/overcommit_memory=1 kernel/panic=10 kernel/panic_on_oops=1 net/ipv4/ip_forward=1; do
  file=$home/state/$(basename "${one%=*}")
  echo "${one#*=}" > "$file"
  mount --bind "$file" "/proc/sys/${one%=*}"
done
mount --bind "$home/state/boot_id" /proc/sys/kernel/random/boot_id

: > "$home/state/mounted"
exec "$pause"
