"""Records which container used which GPU and when: the containers write to a file for each GPU and container."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from attrs import frozen

from tests.e2e.kube import Raw
from tests.e2e.node.containers import container

# Writes the time since boot every 50 ms for each GPU that the container sees. The file name has the GPU, the pod and
# the start time of the container. SIGTERM is ignored; after $BEATS lines the container exits with status 1.
BEAT: Final = """
trap '' TERM
gpus=$(nvidia-smi -L | sed 's/.*UUID: //; s/)//')
read start rest < /proc/uptime
beat=0
while [ "$beat" != "$BEATS" ]; do
  read now rest < /proc/uptime
  for gpu in $gpus; do echo "$now" >> "/beats/$gpu@$POD@$start"; done
  beat=$((beat + 1))
  usleep 50000
done
exit 1
"""


@frozen(order=True)
class Life:
    """The time in which one container had one GPU, in seconds since boot."""

    gpu: str
    first: float
    last: float
    pod: str


def heartbeat_container(pod: str, gpus: int, *, beats: int | None = None) -> Raw:
    """A container with GPUs that writes heartbeats for ever, or `beats` times."""
    env = {"POD": pod, "BEATS": str(beats)}
    return container(gpus, script=BEAT, env=env, volumeMounts=[{"name": "beats", "mountPath": "/beats"}])


def volume_of(directory: Path) -> Raw:
    return {"name": "beats", "hostPath": {"path": str(directory)}}


def lives_in(directory: Path) -> list[Life]:
    return sorted(life for file in directory.iterdir() if (life := life_of(file)) is not None)


def life_of(file: Path) -> Life | None:
    gpu, pod, _ = file.name.split("@")
    times = file.read_text().split()
    return Life(gpu, float(times[0]), float(times[-1]), pod) if times else None


def overlaps(lives: Iterable[Life]) -> list[str]:
    """Describes every overlap of two containers on one GPU."""
    found = []
    by_gpu: dict[str, list[Life]] = {}
    for one in sorted(lives):
        by_gpu.setdefault(one.gpu, []).append(one)
    for lives_of_gpu in by_gpu.values():
        latest = lives_of_gpu[0]
        for one in lives_of_gpu[1:]:
            if one.first <= latest.last:
                both = min(one.last, latest.last) - one.first
                found.append(f"{one.gpu}: {one.pod} beside {latest.pod} for {both:.2f} s from {one.first:.2f} on")
            latest = max(latest, one, key=lambda life: life.last)
    return found
