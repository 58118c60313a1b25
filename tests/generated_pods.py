"""Pods of all kinds that people write, and some that are invalid: made from a seed, the same each time."""

from random import Random

from tests.builders import Raw, raw_container, raw_env, raw_pod, stateful_set
from tests.claim_samples import SAMPLES

LABELS = (
    ("gpuwarden.io/gpu.model", "h100"),
    ("gpuwarden.io/gpu.model", "H100"),
    ("gpuwarden.io/gpu.modle", "h100"),
    ("fudo.org/gpu.memory-80g", "true"),
    ("fudo.org/gpu.assign", "true"),
)
ENVIRONMENTS = (
    {"NVIDIA_VISIBLE_DEVICES": "all"},
    {"CUDA_VISIBLE_DEVICES": "0"},
    {"NVIDIA_VISIBLE_DEVICES": "void"},
    {"APP": "1"},
)
RESOURCES: tuple[str | int, ...] = (1, 2, 3, "1.5", "-1", "many", 5000)
HINTS = {"app.kubernetes.io/job-type": "training", "gpu.mem.gi": "40", "ml.batch_size": "32"}
ODD_KEYS = ("gpuwarden.io/required-hsh", "gpuwarden.io/node", "gpuwarden.io/claim", "cdi.k8s.io/gpu")


def generated_pods(number: int, seed: int = 7) -> list[Raw]:
    chance = Random(seed)  # noqa: S311 - the same pods each time
    return [generated_pod(chance, f"pod-{one}") for one in range(number)]


def generated_pod(chance: Random, name: str) -> Raw:
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    spec: Raw = {}
    owners = []
    for sample in SAMPLES:
        if chance.random() < 0.3:
            written = labels if sample.is_label and chance.random() < 0.5 else annotations
            written[sample.names[0]] = chance.choice((sample.value, *sample.others))
    if chance.random() < 0.4:
        labels.update([chance.choice(LABELS)])
    if chance.random() < 0.3:
        owners = [stateful_set()]
        name = f"train-{chance.randrange(2)}"
    if chance.random() < 0.1:
        annotations |= HINTS
    if chance.random() < 0.15:
        annotations[chance.choice(ODD_KEYS)] = "x"
    if chance.random() < 0.15:
        spec["nodeSelector"] = {"zone": chance.choice("abz")}
    if chance.random() < 0.08:
        spec["nodeName"] = chance.choice(("node-a", "node-z"))
    env = raw_env(**chance.choice(ENVIRONMENTS)) if chance.random() < 0.2 else None
    gpus = chance.choice(RESOURCES) if chance.random() < 0.5 else None
    containers = [raw_container(gpus=gpus, env=env)]
    if chance.random() < 0.2:
        containers.append(raw_container("sidecar"))
    made = raw_pod(*containers, name=name, labels=labels, annotations=annotations, owners=owners, **spec)
    if chance.random() < 0.05:
        made["spec"]["containers"] = chance.choice((5, [7], "none", None))
    return made
