"""The messages between the kubelet and its plugin for dynamic resource allocation.

They are those of `pluginregistration` and of `k8s.io/kubelet/pkg/apis/dra`, whose versions v1 and v1beta1 have the same
fields. Field numbers are those of the protobuf definitions.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.evidence.protobuf import as_bool, as_bytes, as_text, fields_of, message_field, text_field

GET_INFO: Final = "/pluginregistration.Registration/GetInfo"
NOTIFY_STATUS: Final = "/pluginregistration.Registration/NotifyRegistrationStatus"
SERVICES: Final = tuple(f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin" for version in ("v1", "v1beta1"))
WATCH_HEALTH: Final = "/v1alpha1.DRAResourceHealth/NodeWatchResources"
# The kubelet takes the first one that it knows.
SUPPORTED_VERSIONS: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
PLUGIN_TYPE: Final = "DRAPlugin"
# A pod has a few claims.
MAX_CLAIMS: Final = 256


class TooManyClaimsError(GpuwardenError):
    """A request names more claims than a pod can have."""


@frozen
class ClaimName:
    """A claim in a request of the kubelet."""

    namespace: str
    uid: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, message: bytes) -> "ClaimName":
        found = {number: value for number, value in fields_of(message) if number in (1, 2, 3)}
        return cls(*(as_text(found.get(number, b"")) for number in (1, 2, 3)))


@frozen
class PreparedDevice:
    """A device of a claim. `cdi` is the CDI device that the container gets with it; empty for none."""

    request: str
    pool: str
    device: str
    cdi: str = ""

    def encode(self) -> bytes:
        names = (self.request, self.pool, self.device, self.cdi)
        return b"".join(text_field(number, name) for number, name in enumerate(names, 1))


@frozen
class PreparedClaim:
    """The answer for one claim: its devices, or the reason why the pod must not start."""

    devices: tuple[PreparedDevice, ...] = ()
    error: str = ""

    def encode(self) -> bytes:
        return b"".join(message_field(1, one.encode()) for one in self.devices) + text_field(2, self.error)


def claims_in(request: bytes) -> list[ClaimName]:
    """The claims of a request to prepare, or to unprepare. Raises MalformedMessageError or TooManyClaimsError."""
    found = [as_bytes(value) for number, value in fields_of(request) if number == 1]
    if len(found) > MAX_CLAIMS:
        raise TooManyClaimsError(f"the request names {len(found)} claims, the maximum is {MAX_CLAIMS}")
    return [ClaimName.parse(one) for one in found]


def prepared(claims: Mapping[str, PreparedClaim]) -> bytes:
    """The answer to a request to prepare, by uid."""
    return b"".join(entry(uid, one.encode()) for uid, one in claims.items())


def unprepared(uids: Iterable[str]) -> bytes:
    """The answer to a request to unprepare: done."""
    return b"".join(entry(uid, b"") for uid in uids)


def entry(uid: str, answer: bytes) -> bytes:
    """An entry of the map of claims, which is the only field of an answer."""
    return message_field(1, text_field(1, uid) + message_field(2, answer))


def plugin_info(driver: str, endpoint: str) -> bytes:
    """The answer to GetInfo."""
    versions = b"".join(text_field(4, one) for one in SUPPORTED_VERSIONS)
    return text_field(1, PLUGIN_TYPE) + text_field(2, driver) + text_field(3, endpoint) + versions


def registration_problem(message: bytes) -> str | None:
    """Why the kubelet has not registered the plugin; None if it has."""
    found = dict(fields_of(message))
    if as_bool(found.get(1, 0)):
        return None
    return as_text(found.get(2, b"")) or "unknown"
