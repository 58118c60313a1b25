"""The parsers of untrusted input, each with its corpus group and the errors that it may raise."""

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from attrs import frozen

from scripts.fuzz import parsers_of_answers as answers
from scripts.fuzz import parsers_of_objects as objects
from scripts.fuzz.parsers_of_objects import stored
from webhook.admission import audit, binding_ends, delivered, evidence_loss
from webhook.admission.manifest_pods import pods_of
from webhook.commands.score import QuestionWire
from webhook.core import binding, claim, extender_wire, gpu_map, hashes, hints, pod, proof_claims, review
from webhook.core.caller import CallersUnavailableError
from webhook.core.dress import DressRules
from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId
from webhook.core.reservation import PodIdentity
from webhook.dra import reserved_claims
from webhook.evidence import node_evidence, record
from webhook.evidence.jwt import jwt_bundle, jwt_svid
from webhook.evidence.jwt.nonce import Nonces
from webhook.evidence.spire import spire_messages
from webhook.export import nodes as export_nodes
from webhook.export import reader, uses
from webhook.inventory import discovery, node_annotations, node_gpus, nvidia_smi
from webhook.inventory.file import InventoryParser
from webhook.kube import gpu_slices, pods, resource_claims, resource_slices
from webhook.kube.gpu_node import GpuNode
from webhook.kube.json_objects import decoded, object_in, status_message
from webhook.kube.node import node_of, plugin_gpus
from webhook.ledger.api_pods import pod_in
from webhook.ledger.end_of_use import NodeSnapshot
from webhook.ledger.pods import PodsUnavailableError
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod
from webhook.node import dra_messages
from webhook.scheduler import nominations, wakeups
from webhook.web.evidence import ProofBody
from webhook.web.finalize import FinalizeBody

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
RULES = claim.ClaimRules()
EVIDENCE_ID = EvidenceId(DEFAULT_TEMPLATE, "example.org")
EXAMINER = jwt_svid.TokenVerifier(EVIDENCE_ID, Nonces(lambda: [bytes(32)], timedelta(seconds=5)), timedelta(seconds=5))


@frozen
class Parser:
    """A function that parses bytes. `refuses` are the errors for invalid input."""

    name: str
    read: Callable[[bytes], object]
    seeds: str
    refuses: tuple[type[Exception], ...] = (GpuwardenError,)


def raw(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """A parser of API objects, combined with the JSON decoder."""

    def both(text: bytes) -> object:
        return read(object_in(text))

    return both


def text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda content: read(content.decode(errors="replace"))


def claims_of(found: Any) -> object:
    asked = pod.Pod.parse(found)
    return claim.claim_of(asked, RULES), claim.recorded_claim_or_none(asked), hints.features_of(asked)


def own_claim_of(found: Any) -> object:
    is_owned = reserved_claims.is_owned(found, PodIdentity("ml", "train", "uid-1"))
    return is_owned, reserved_claims.hash_asked_for(found), proof_claims.without_defaults(found["spec"])


def agents_of(message: bytes) -> object:
    return [spire_messages.AgentMessage.parse(one) for one in spire_messages.AgentPage.parse(message).agents]


def allocations_of(found: Any) -> object:
    awaited = resource_claims.awaited_challenge(found)
    if awaited is not None:
        resource_claims.with_answer(found, awaited, {})
    unused = resource_claims.unused_allocation(found)
    return resource_claims.allocated_claim(found), resource_claims.proof_allocation(found), unused


def closed_devices_of(found: Any) -> object:
    return resource_slices.slice_count(found), resource_slices.close_ended(found, NOW)


UNREADABLE = (GpuwardenError, msgspec.DecodeError, msgspec.ValidationError)
PARSERS = (
    Parser("AdmissionReview", review.Review.parse, "reviews"),
    Parser("claim of a pod", raw(claims_of), "pods", UNREADABLE),
    Parser("pod with a reservation", raw(ReservedPod.of), "pods", UNREADABLE),
    Parser("pod as it is found", raw(PodSnapshot.of), "pods", UNREADABLE),
    Parser("pod by its name", lambda content: pod_in(content, "ml", "train"), "pods", (PodsUnavailableError,)),
    Parser("Job", raw(hints.with_features_in_template), "pods", UNREADABLE),
    Parser("Binding", raw(lambda one: binding.Binding.parse(one, "ns", "name")), "bindings", UNREADABLE),
    Parser("GPUNode", raw(GpuNode.parse), "gpunodes", UNREADABLE),
    Parser("NodeEvidence", raw(node_evidence.NodeEvidence.parse), "evidence", UNREADABLE),
    Parser("slice of GPUs", raw(gpu_slices.gpu_slice), "slices", UNREADABLE),
    Parser("slice of proof devices", raw(closed_devices_of), "slices", UNREADABLE),
    Parser("ResourceClaim", raw(allocations_of), "resourceclaims", UNREADABLE),
    Parser("pod that needs a claim", raw(reserved_claims.ClaimingPod.of), "pods", UNREADABLE),
    Parser("claim of a pod's name", raw(own_claim_of), "resourceclaims", UNREADABLE),
    Parser("Node", raw(node_of), "nodes", UNREADABLE),
    Parser("annotation of devices", text(node_annotations.devices_in), "annotations"),
    Parser("annotation of readings", text(node_gpus.gpus_in), "readings"),
    Parser("nvidia-smi", nvidia_smi.parse, "smi"),
    Parser("inventory file", lambda content: InventoryParser(content).contents(), "inventories"),
    Parser("placement map", text(gpu_map.parse_map), "maps", (gpu_map.MapLineError, GpuwardenError)),
    Parser("list of hashes", text(lambda one: hashes.hashes_in(one, "here")), "hashes"),
    Parser("extender's arguments", extender_wire.ExtenderArgs.parse, "extender"),
    Parser("extender's binding", extender_wire.BindArgs.parse, "extender"),
    Parser("extender's victims", extender_wire.PreemptArgs.parse, "extender"),
    Parser("finalize", FinalizeBody.parse, "finalize"),
    Parser("record of evidence", text(lambda one: record.verified(one, (), EVIDENCE_ID)), "records"),
    Parser("record that was written earlier", text(record.claim_of), "records"),
    Parser("JWT-SVID", text(lambda one: EXAMINER.check_claims(one, NOW)), "tokens"),
    Parser("bundle of keys", jwt_bundle.parse_bundle, "bundles"),
    Parser("agents of SPIRE", agents_of, "messages"),
    Parser("pod at its end", stored(objects.end_of_pod), "pods", UNREADABLE),
    Parser("pod of the list of ends", stored(binding_ends.Unbound.of), "pods", UNREADABLE),
    Parser("BindingEnds", stored(objects.kept_ends), "ends", UNREADABLE),
    Parser("StatefulSet with a map", stored(objects.mapped_set), "sets", UNREADABLE),
    Parser("Workload of Kueue", stored(objects.of_kueue), "workloads", UNREADABLE),
    Parser("Namespace", stored(objects.namespace), "namespaces", UNREADABLE),
    Parser("node whose kubelet lives", stored(NodeSnapshot.of), "nodes", UNREADABLE),
    Parser("node with readings", stored(discovery.annotations_of), "nodes", UNREADABLE),
    Parser("node of the exporter", stored(export_nodes.trim_node), "nodes", UNREADABLE),
    Parser("pod of the exporter", stored(reader.parse_pod), "pods", UNREADABLE),
    Parser("GPUNode of the exporter", stored(uses.HeldDevices.parse), "gpunodes", UNREADABLE),
    Parser("resident pod", stored(lambda one: evidence_loss.BoundPod.of(one, RULES)), "pods", UNREADABLE),
    Parser("pod that waits for a scheduler", stored(wakeups.is_rejected_by_us), "pods", UNREADABLE),
    Parser("pod whose Binding was refused", stored(nominations.refused_pod), "pods", UNREADABLE),
    Parser("refusal of a Binding", lambda content: pods.error_message(409, content), "refusals"),
    Parser("refusal of a request", status_message, "refusals"),
    Parser("refusal of an object", answers.refused_object, "refusals"),
    Parser("TrustBundle", stored(objects.trust_bundle), "trustbundles", UNREADABLE),
    Parser("TokenReview", answers.token_review, "tokenreviews", (CallersUnavailableError,)),
    Parser("SubjectAccessReview", answers.access_review, "accessreviews", (CallersUnavailableError,)),
    Parser("frames of exec", answers.exec_frames, "frames"),
    Parser("X.509-SVID", answers.x509_svid, "svids"),
    Parser("peer's certificate", answers.peer, "ders", (ssl.SSLCertVerificationError,)),
    Parser("answer of the Workload API", answers.jwt_answer, "svids"),
    Parser("pods of a kubelet", answers.pods_of_a_kubelet, "nodepods"),
    Parser("sandboxes of a container runtime", answers.sandboxes_of_a_runtime, "nodepods"),
    Parser("containers of a container runtime", answers.containers_of_a_runtime, "nodepods"),
    Parser("claims of a kubelet", dra_messages.claims_in, "draclaims"),
    Parser("registration by a kubelet", dra_messages.registration_problem, "draclaims"),
    Parser("pod that is audited", stored(audit.AuditRules(RULES, DressRules()).pod), "pods", UNREADABLE),
    Parser("pod with devices of a plugin", stored(delivered.GivenDevices.of), "pods", UNREADABLE),
    Parser(
        "node with a device plugin",
        stored(lambda one: plugin_gpus(one, "nvidia.com/gpu")),
        "nodes",
        UNREADABLE,
    ),
    Parser("bundle of certificates", answers.certificate_bundle, "certificates"),
    Parser("answer of a scorer", answers.scorers_answer, "scores", (*UNREADABLE, RecursionError, UnicodeDecodeError)),
    Parser("question to a scorer", lambda one: decoded(one, QuestionWire), "questions", UNREADABLE),
    Parser("answer to a challenge", lambda one: decoded(one, ProofBody), "answers", UNREADABLE),
    Parser("manifest", text(pods_of), "manifests"),
)
