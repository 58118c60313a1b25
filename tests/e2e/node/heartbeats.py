"""Records which container used which GPU and when: the containers write to a file for each GPU and container. Each also
writes once which GPUs it sees."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from tests.e2e.kube import Raw
from tests.e2e.node.containers import Seen, container, uuids_of

# Writes the time since boot every 50 ms for each GPU that the container sees. The file name has the GPU, the pod, the
# container and its start time. SIGTERM is ignored; after $BEATS lines the container exits with the status $STATUS.
BEAT: Final = """
trap '' TERM
read start rest < /proc/uptime
mine=$POD@$NAME@$start
{ nvidia-smi -L; ls /dev | grep '^nvidia'; } > "/beats/seen/.$mine"
mv "/beats/seen/.$mine" "/beats/seen/$mine"
gpus=$(sed -n 's/.*UUID: \\(.*\\))/\\1/p' "/beats/seen/$mine")
beat=0
while [ "$beat" != "$BEATS" ]; do
  read now rest < /proc/uptime
  for gpu in $gpus; do echo "$now" >> "/beats/lives/$gpu@$mine"; done
  beat=$((beat + 1))
  usleep 50000
done
exit $STATUS
"""


@frozen(order=True)
class Life:
    """The time in which one container had one GPU, in seconds since boot."""

    gpu: str
    first: float
    last: float
    pod: str
    container: str = "main"


def heartbeat_container(
    pod: str, gpus: int, *, name: str = "main", beats: int | None = None, status: int = 1, **more: Any
) -> Raw:
    """A container with GPUs that writes heartbeats for ever, or `beats` times."""
    env = {"POD": pod, "NAME": name, "BEATS": str(beats), "STATUS": str(status)}
    mounts = [{"name": "beats", "mountPath": "/beats"}]
    return container(gpus, name=name, script=BEAT, env=env, volumeMounts=mounts, **more)


def beats_in(directory: Path) -> Path:
    """A directory for heartbeats."""
    for name in ("lives", "seen"):
        (directory / "beats" / name).mkdir(parents=True)
    return directory / "beats"


def volume_of(beats: Path) -> Raw:
    return {"name": "beats", "hostPath": {"path": str(beats)}}


def lives_in(beats: Path) -> list[Life]:
    return sorted(life for file in (beats / "lives").iterdir() if (life := life_of(file)) is not None)


def life_of(file: Path) -> Life | None:
    gpu, pod, name, _ = file.name.split("@")
    times = file.read_text().split()
    return Life(gpu, float(times[0]), float(times[-1]), pod, name) if times else None


def seen_in_containers(beats: Path) -> dict[str, list[Seen]]:
    """What each started container saw, by pod."""
    found: dict[str, list[Seen]] = {}
    for file in (beats / "seen").glob("[!.]*"):
        lines = file.read_text().splitlines()
        devices = tuple(line for line in lines if line.startswith("nvidia"))
        found.setdefault(file.name.partition("@")[0], []).append(Seen(uuids_of(lines), devices))
    return found


@frozen
class Overlap:
    """Two containers on one GPU at the same time."""

    earlier: Life
    later: Life

    def __str__(self) -> str:
        one, other = self.later, self.earlier
        seconds = min(one.last, other.last) - one.first
        return f"{one.gpu}: {one.pod} beside {other.pod} for {seconds:.2f} s from {one.first} on"


def overlaps(lives: Iterable[Life], *, are_shared: bool = True) -> list[Overlap]:
    """Every overlap of two containers on one GPU. With `are_shared`, containers of one pod share its GPUs."""
    by_gpu: dict[str, list[Life]] = {}
    for one in sorted(lives):
        by_gpu.setdefault(one.gpu, []).append(one)
    return [
        Overlap(other, one)
        for of_gpu in by_gpu.values()
        for other, one in itertools.combinations(of_gpu, 2)
        if one.first <= other.last and not (are_shared and one.pod == other.pod and one.container != other.container)
    ]
