"""The files of signed records on this node, and the CDI specifications that mount them into containers."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

import structlog
from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import EvidenceIdParts
from webhook.core.proof_devices import DRIVER, ProofDevice
from webhook.core.raw import Raw
from webhook.evidence.record import BadRecordError, EvidenceRecord, RecordedClaim, claim_of, signed
from webhook.evidence.spire.x509_svid import X509Svid
from webhook.kube.resource_claims import AllocatedProof
from webhook.kube.resource_slices import proof_devices_of
from webhook.node.dra_messages import ClaimName
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

KIND: Final = f"{DRIVER}/record"
CDI_VERSION: Final = "0.5.0"
# In the container.
PATH: Final = "/run/gpuwarden/evidence.jws"
VARIABLE: Final = "GPUWARDEN_EVIDENCE"
MOUNT_OPTIONS: Final = ("ro", "nosuid", "nodev", "noexec", "bind")
SUFFIX: Final = ".jws"
SPEC_NAME: Final = DRIVER + "-record-{uid}.json"
# The name of a CDI device, and of a file.
UID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")


class NotRecordedError(GpuwardenError):
    """The record cannot be written or removed at this moment."""


class SliceReader(Protocol):
    """Reads the slices with proof devices of this node."""

    async def read(self) -> list[Raw]:
        """Raises GpuwardenError."""


@frozen
class EvidenceRecords:
    """The records of the claims that are prepared on this node. Only root can write to both directories."""

    # On the node, under the same path in this process.
    files: Path
    specs: Path
    slices: SliceReader
    svid_of: Callable[[str], Awaitable[X509Svid]]
    clock: Clock

    async def write(
        self,
        name: ClaimName,
        pods: Sequence[str],
        proofs: Sequence[AllocatedProof],
        spiffe_id: str,
        parts: EvidenceIdParts,
    ) -> str:
        """Writes the record of the claim, and returns the CDI device that mounts it. Raises NotRecordedError or
        the errors of the slices and the Workload API."""
        devices = {one.name: one for raw in await self.slices.read() for one in proof_devices_of(raw)}
        if missing := [one.device.name for one in proofs if one.device.name not in devices]:
            raise NotRecordedError(f"the proof device {missing[0]} is in no slice of this node")
        published = [devices[one.device.name] for one in proofs]
        record = EvidenceRecord(
            node=parts.node,
            spiffe_id=spiffe_id,
            hash=parts.hash,
            issued=self.clock().replace(microsecond=0),
            until=first_end(published),
            claim=RecordedClaim(name.namespace, name.name, name.uid),
            pods=list(pods),
            gpus=[one.uuid for one in published],
        )
        text = signed(record, await self.svid_of(spiffe_id))
        try:
            replace(self._file(name.uid), text)
            replace(self._spec(name.uid), json.dumps(self._cdi(name.uid)))
        except OSError as exc:
            raise NotRecordedError(f"the record of the evidence cannot be written: {exc}") from exc
        return f"{KIND}={name.uid}"

    def remove(self, uid: str) -> None:
        """The specification first: without it no container can be started with the file. Raises NotRecordedError."""
        try:
            self._spec(uid).unlink(missing_ok=True)
            self._file(uid).unlink(missing_ok=True)
        except OSError as exc:
            raise NotRecordedError(f"the record of the evidence cannot be removed: {exc}") from exc

    def claims(self) -> Mapping[str, ClaimName]:
        """The claims of the records that are there, by uid. A file that is no record is removed. One that cannot be
        read stays: a container may be started with it."""
        found = {}
        for path in self.files.glob(f"*{SUFFIX}*"):
            try:
                claim = claim_of(path.read_text(encoding="utf-8"))
                found[checked(path.stem)] = ClaimName(claim.namespace, path.stem, claim.name)
            except (BadRecordError, NotRecordedError, UnicodeDecodeError):
                path.unlink(missing_ok=True)
            except OSError as exc:
                log.warning("record of the evidence not read", file=str(path), problem=str(exc))
        return found

    def _file(self, uid: str) -> Path:
        return self.files / f"{checked(uid)}{SUFFIX}"

    def _spec(self, uid: str) -> Path:
        return self.specs / SPEC_NAME.format(uid=checked(uid))

    def _cdi(self, uid: str) -> Raw:
        mount = {"hostPath": str(self._file(uid)), "containerPath": PATH, "options": list(MOUNT_OPTIONS)}
        edits = {"env": [f"{VARIABLE}={PATH}"], "mounts": [mount]}
        return {"cdiVersion": CDI_VERSION, "kind": KIND, "devices": [{"name": uid, "containerEdits": edits}]}


def checked(uid: str) -> str:
    """Raises NotRecordedError for a uid that is no file name."""
    if not UID.fullmatch(uid):
        raise NotRecordedError(f"{uid[:40]!r} is not the uid of a claim")
    return uid


def first_end(devices: Sequence[ProofDevice]) -> datetime | None:
    return min((one.end for one in devices if one.end is not None), default=None)


def replace(path: Path, text: str) -> None:
    """Writes the file at once: a runtime never reads a part of it, nor the file beside it, whose name is not that of a
    specification. Containers with any user may read it."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.tmp")
    hidden.write_text(text, encoding="utf-8")
    hidden.chmod(0o644)
    hidden.replace(path)
