"""Annotation and label keys that others read or write, with their aliases. `claim_keys` has those of claims."""

from typing import Final

from attrs import frozen

DOMAIN: Final = "gpuwarden.io"
ASSIGNER_DOMAIN: Final = "fudo.org"
SCORING_DOMAIN: Final = "scheduler.radix.ai"
CDI_DOMAIN: Final = "cdi.k8s.io"


@frozen
class Key:
    """A key, and the names that older systems use for it."""

    name: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


# The label of namespaces whose pods are reviewed.
OPT_IN: Final = Key(f"{DOMAIN}/enabled", (f"{SCORING_DOMAIN}/enabled",))

# The hashes that a pod or a namespace requires of a node.
REQUIRED_HASH: Final = Key(f"{DOMAIN}/required-hash", ("attestation-hash.my-company.com/required-hash",))

# Only gpuwarden writes these.
GPU_UUID: Final = Key(f"{DOMAIN}/gpu-uuid", (f"{ASSIGNER_DOMAIN}/gpu.uuid",))
RESERVATION_ID: Final = Key(f"{DOMAIN}/reservation-id", (f"{ASSIGNER_DOMAIN}/gpu.reservation-id",))
NODE: Final = Key(f"{DOMAIN}/node", (f"{ASSIGNER_DOMAIN}/gpu.node",))
CLAIM: Final = Key(f"{DOMAIN}/claim")

# Native pods: written by a policy of the API server (native.yaml).
NATIVE: Final = f"{DOMAIN}/native"
# With the value `bind`, a native pod is bound after its node has answered a new challenge.
CHALLENGE: Final = f"{DOMAIN}/challenge"

OUTPUTS: Final = (GPU_UUID, RESERVATION_ID, NODE, CLAIM)
OUTPUT_NAMES: Final = frozenset(name for key in OUTPUTS for name in key.names)

# The features of a pod or a Job, for a scorer.
JOB_TYPE: Final = "app.kubernetes.io/job-type"
GPU_MEMORY: Final = "gpu.mem.gi"
BATCH_SIZE: Final = "ml.batch_size"
TENANT: Final = f"{SCORING_DOMAIN}/tenant"
FEATURES: Final = (JOB_TYPE, GPU_MEMORY, BATCH_SIZE, TENANT)
# Node labels for the model of the GPUs. The first is preferred for selectors.
GPU_TYPE_LABELS: Final = ("gpu.nvidia.com/class", "nvidia.com/gpu.product")

# The scorer's answer. Informational only.
PRIORITY_SCORE: Final = Key(f"{DOMAIN}/priority-score", (f"{SCORING_DOMAIN}/priority-score",))
CHOSEN_GPU: Final = Key(f"{DOMAIN}/chosen-gpu", (f"{SCORING_DOMAIN}/chosen-gpu",))
DECISION_TIMESTAMP: Final = Key(f"{DOMAIN}/decision-timestamp", (f"{SCORING_DOMAIN}/decision-timestamp",))
HINT_NAMES: Final = frozenset(name for key in (PRIORITY_SCORE, CHOSEN_GPU, DECISION_TIMESTAMP) for name in key.names)

# When an unschedulable pod was last put back into its scheduler's queue. Informational only.
WOKEN_AT: Final = f"{DOMAIN}/woken-at"

# A label of a namespace, set by administrators: the maps of its StatefulSets set GPUs aside.
MAPS_LABEL: Final = f"{DOMAIN}/maps"
# What gives containers their GPUs: a label of nodes, and an annotation of namespaces for their new pods.
INJECTION: Final = f"{DOMAIN}/injection"
# With the value `none` on a namespace, its pods may use devices of their nodes.
ISOLATION_LABEL: Final = f"{DOMAIN}/isolation"

# Queued pods: their scheduling gate, the reason why they wait (informational only), and the label by which replicas
# find them.
QUEUE_GATE: Final = f"{DOMAIN}/queue"
WAITING: Final = f"{DOMAIN}/waiting"
# The prefix of the finalizer in reviewed Bindings. The node name follows.
REVIEWED_FOR: Final = f"{DOMAIN}/reviewed-for-"
QUEUED_LABEL: Final = f"{DOMAIN}/queued"

# The taint of nodes whose evidence ended while pods run there, if that is configured.
EVIDENCE_LOST_TAINT: Final = f"{DOMAIN}/evidence-lost"

# The GPUs of a node, from an agent on the node: base64 of a JSON object, GPU UUID to a list of labels.
ASSIGNER_DEVICE_LABELS: Final = f"{ASSIGNER_DOMAIN}/gpu.device.labels"
# The same, written by `gpuwarden export` on the node: JSON, see `inventory/node_gpus`.
NODE_GPUS: Final = f"{DOMAIN}/gpus"
# The label of objects that gpuwarden creates and may delete.
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
OURS: Final = "gpuwarden"

# The variables that select the GPUs of a container.
NVIDIA_ENV: Final = "NVIDIA_VISIBLE_DEVICES"
CUDA_ENV: Final = "CUDA_VISIBLE_DEVICES"
GPU_ENV: Final = (NVIDIA_ENV, CUDA_ENV)
# Without the variables above, it exposes all GPUs of the node.
CUDA_VERSION: Final = "CUDA_VERSION"
NVIDIA_RESOURCES: Final = "nvidia.com/"

# Node and pod labels.
HOSTNAME_LABEL: Final = "kubernetes.io/hostname"
POD_INDEX_LABEL: Final = "apps.kubernetes.io/pod-index"
LOGICAL_NODE_LABEL: Final = "gpu-node-name"


def is_cdi(key: str) -> bool:
    """Whether it is a CDI annotation, by which a container runtime injects devices: CDI's own domain or a vendor's."""
    domain, slash, _ = key.partition("/")
    return bool(slash) and (domain == CDI_DOMAIN or domain.endswith(f".{CDI_DOMAIN}"))


def is_protected_annotation(key: str) -> bool:
    """Whether only gpuwarden may write it, or it requests devices from a container runtime."""
    return key in OUTPUT_NAMES or is_cdi(key)
