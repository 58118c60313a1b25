"""Every annotation and label key that others read or write, once. Canonical name first, aliases behind it."""

from typing import Final, NamedTuple

DOMAIN: Final = "gpuwarden.io"
S4_DOMAIN: Final = "fudo.org"
S3_DOMAIN: Final = "scheduler.radix.ai"
CDI_DOMAIN: Final = "cdi.k8s.io"


class Key(NamedTuple):
    """A key and the older systems' names for the same thing."""

    name: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


# What a pod may ask with.
REQUIRED_HASH: Final = Key(f"{DOMAIN}/required-hash", ("attestation-hash.my-company.com/required-hash",))
GPU_COUNT: Final = Key(f"{DOMAIN}/gpu-count")
GPU_MAP: Final = Key(f"{DOMAIN}/gpu-map", ("gpu-scheduling-map",))
SHARED: Final = Key(f"{DOMAIN}/shared")

# On a namespace whose pods are looked at: a label, and what it has to say.
OPT_IN: Final = Key(f"{DOMAIN}/enabled", (f"{S3_DOMAIN}/enabled",))

# Device requirements are labels: gpuwarden.io/gpu.<key>=<value> and fudo.org/gpu.<x>.
REQUIREMENT_PREFIX: Final = f"{DOMAIN}/gpu."
S4_REQUIREMENT: Final = f"{S4_DOMAIN}/gpu"
S4_ASSIGN: Final = f"{S4_DOMAIN}/gpu.assign"

# What the product writes, and what nobody else may.
GPU_UUID: Final = Key(f"{DOMAIN}/gpu-uuid", (f"{S4_DOMAIN}/gpu.uuid",))
RESERVATION_ID: Final = Key(f"{DOMAIN}/reservation-id", (f"{S4_DOMAIN}/gpu.reservation-id",))
NODE: Final = Key(f"{DOMAIN}/node", (f"{S4_DOMAIN}/gpu.node",))
CLAIM: Final = Key(f"{DOMAIN}/claim")

OUTPUTS: Final = (GPU_UUID, RESERVATION_ID, NODE, CLAIM)
OUTPUT_NAMES: Final = frozenset(name for key in OUTPUTS for name in key.names)
INPUT_NAMES: Final = frozenset(name for key in (REQUIRED_HASH, GPU_COUNT, GPU_MAP, SHARED) for name in key.names)

# What a pod or a Job says of its work, for a scorer.
JOB_TYPE: Final = "app.kubernetes.io/job-type"
GPU_MEMORY: Final = "gpu.mem.gi"
BATCH_SIZE: Final = "ml.batch_size"
TENANT: Final = f"{S3_DOMAIN}/tenant"
FEATURES: Final = (JOB_TYPE, GPU_MEMORY, BATCH_SIZE, TENANT)
# Node labels that name the model of its GPUs, the one that selectors prefer first.
GPU_TYPE_LABELS: Final = ("gpu.nvidia.com/class", "nvidia.com/gpu.product")

# What became of the scorer's answer. Nobody goes by it.
PRIORITY_SCORE: Final = Key(f"{DOMAIN}/priority-score", (f"{S3_DOMAIN}/priority-score",))
CHOSEN_GPU: Final = Key(f"{DOMAIN}/chosen-gpu", (f"{S3_DOMAIN}/chosen-gpu",))
DECISION_TIMESTAMP: Final = Key(f"{DOMAIN}/decision-timestamp", (f"{S3_DOMAIN}/decision-timestamp",))
HINT_NAMES: Final = frozenset(name for key in (PRIORITY_SCORE, CHOSEN_GPU, DECISION_TIMESTAMP) for name in key.names)

# When a pod that waits was last shown to its scheduler again. Nobody goes by it.
WOKEN_AT: Final = f"{DOMAIN}/woken-at"

# On a namespace, set by its administrators: its StatefulSets' maps keep GPUs from others.
MAPS_LABEL: Final = f"{DOMAIN}/maps"
# And `none` there: its pods may reach devices of their nodes.
ISOLATION_LABEL: Final = f"{DOMAIN}/isolation"

# A pod that waits for its GPUs: the scheduling gate that holds it, what it waits for (nobody goes by it), and the label
# by which replicas find those that wait.
QUEUE_GATE: Final = f"{DOMAIN}/queue"
WAITING: Final = f"{DOMAIN}/waiting"
# Begins the mark of a Binding that was reviewed; the node follows.
REVIEWED_FOR: Final = f"{DOMAIN}/reviewed-for-"
QUEUED_LABEL: Final = f"{DOMAIN}/queued"

# On nodes whose evidence has ended under running pods, where that is asked for.
EVIDENCE_LOST_TAINT: Final = f"{DOMAIN}/evidence-lost"

# What a node has, as it says itself: base64 of a JSON object, GPU UUID to a list of labels.
S4_DEVICE_LABELS: Final = f"{S4_DOMAIN}/gpu.device.labels"
# And as `gpuwarden export` has read it there: JSON, see `inventory/node_gpus`.
NODE_GPUS: Final = f"{DOMAIN}/gpus"
# On objects that we have made and may take away again.
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
OURS: Final = "gpuwarden"

# What decides which GPUs a container sees.
NVIDIA_ENV: Final = "NVIDIA_VISIBLE_DEVICES"
CUDA_ENV: Final = "CUDA_VISIBLE_DEVICES"
GPU_ENV: Final = (NVIDIA_ENV, CUDA_ENV)
# By itself it shows a container all GPUs of its node.
CUDA_VERSION: Final = "CUDA_VERSION"
NVIDIA_RESOURCES: Final = "nvidia.com/"

# Names that Kubernetes gives.
HOSTNAME_LABEL: Final = "kubernetes.io/hostname"
POD_INDEX_LABEL: Final = "apps.kubernetes.io/pod-index"
LOGICAL_NODE_LABEL: Final = "gpu-node-name"


def is_cdi(key: str) -> bool:
    """An instruction to a container runtime about devices, under CDI's own domain or a vendor's."""
    domain, slash, _ = key.partition("/")
    return bool(slash) and (domain == CDI_DOMAIN or domain.endswith(f".{CDI_DOMAIN}"))


def is_protected_annotation(key: str) -> bool:
    """Ours to write, or an instruction to a container runtime about GPUs."""
    return key in OUTPUT_NAMES or is_cdi(key)
