"""The variables that expose GPUs to a container, and how to hide all GPUs from it.

NVIDIA's container runtime reads the environment of a container: `env`, `envFrom` and the variables of its image. `env`
overrides the others. If a name occurs twice, the last one counts. Without `NVIDIA_VISIBLE_DEVICES`, any `CUDA_VERSION`
exposes all GPUs of the node.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from webhook.core import keys
from webhook.core.pod import Container, EnvVar

Json = Any

# Values that expose no GPU.
HIDING_VALUES = {keys.NVIDIA_ENV: {"", "void", "none"}, keys.CUDA_ENV: {"", "-1", "NoDevFiles"}}
VOID: Mapping[str, str] = {"name": keys.NVIDIA_ENV, "value": "void"}


def env_hiding_gpus(env: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """The variables with `NVIDIA_VISIBLE_DEVICES=void`, which overrides image and `envFrom`."""
    own = [one for one in env if one.get("name") == keys.NVIDIA_ENV]
    if len(own) == 1 and own[0].get("value") == VOID["value"] and not own[0].get("valueFrom"):
        return list(env)
    return [*(one for one in env if one.get("name") != keys.NVIDIA_ENV), dict(VOID)]


def with_gpus_hidden(raw: Mapping[str, Json], *groups: str) -> Mapping[str, Json]:
    """The pod with GPUs hidden from every container of these lists, except containers that set the variable to GPUs.
    The same object if nothing changes."""
    spec = raw.get("spec") or {}
    made = {group: [hidden_unless_set(one) for one in spec[group]] for group in groups if spec.get(group)}
    return {**raw, "spec": {**spec, **made}} if any(made[group] != spec[group] for group in made) else raw


def hidden_unless_set(container: dict[str, Json]) -> dict[str, Json]:
    """A value that exposes GPUs stays, so that the validating webhook denies the pod with a message."""
    env = container.get("env") or []
    own = [one for one in env if one.get("name") == keys.NVIDIA_ENV]
    return {**container, "env": env_hiding_gpus(env)} if not own or hides_all(own[-1]) else container


def hides_all(env: Mapping[str, Json]) -> bool:
    return not env.get("valueFrom") and (env.get("value") or "") in HIDING_VALUES.get(env.get("name", ""), ())


def is_harmless(one: EnvVar) -> bool:
    return one.literal is not None and one.literal in HIDING_VALUES.get(one.name, ())


def visible_env(container: Container) -> Iterator[EnvVar]:
    """The variables that would expose GPUs to the container, one of each name."""
    last = {one.name: one for one in container.env or ()}
    return (last[name] for name in keys.GPU_ENV if name in last and not is_harmless(last[name]))


def exposes_all_gpus(container: Container) -> bool:
    """Whether the container sets `CUDA_VERSION` without `NVIDIA_VISIBLE_DEVICES`."""
    names = {one.name for one in container.env or ()}
    return keys.CUDA_VERSION in names and keys.NVIDIA_ENV not in names
