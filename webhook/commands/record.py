"""`gpuwarden record verify`: checks a record of the evidence that a container got with its GPUs."""

import sys
from pathlib import Path

import msgspec

from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import EvidenceId
from webhook.evidence.record import verified
from webhook.runtime.tls.certificates import certificates_in


def verify(file: Path, bundle: Path, trust_domain: str, template: str) -> int:
    """Prints the content of the record as JSON. Raises BadRecordError, or GpuwardenError for other files."""
    try:
        text, roots = file.read_text(encoding="ascii").strip(), certificates_in(bundle.read_bytes())
        evidence_id = EvidenceId(template, trust_domain)
    except OSError as exc:
        raise GpuwardenError(f"{exc.filename}: {exc.strerror}") from exc
    except ValueError as exc:
        raise GpuwardenError(f"record, bundle or --evidence-id cannot be read: {exc}") from exc
    content = msgspec.json.format(msgspec.json.encode(verified(text, roots, evidence_id)), indent=2)
    sys.stdout.write(content.decode() + "\n")
    return 0
