"""The JSON schema of each kind of setting. It refuses values before the installation that the command would certainly
refuse, and accepts everything that the command accepts. The command checks the rest.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from webhook.export import kinds as export_kinds
from webhook.runtime import setting_kinds as kinds
from webhook.runtime.setting_kinds import SettingKind

Schema = dict[str, Any]

BOOL: Final[Schema] = {"type": "boolean"}


def one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def text(pattern: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$"}


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def several(word: str) -> Schema:
    """A list, or a text with commas."""
    both = rf"^\s*{word}\s*(,\s*{word}\s*)*$"
    return {"type": ["array", "string"], "minItems": 1, "items": {"type": "string", "pattern": both}, "pattern": both}


# Helm uses Go's regular expressions, which have no lookahead or lookbehind.
DNS_NAME: Final = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
LABEL_NAME: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LAST_PART: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
WORD: Final = r"[!-+.-~-]{1,253}"
# As many digits as the longest accepted duration has: a week, or ten years.
SHORT: Final = (
    r"[0-9]{1,9}(\.[0-9]{1,9})?ms|[0-9]{1,6}(\.[0-9]{1,9})?s?|[0-9]{1,5}(\.[0-9]{1,9})?m|[0-9]{1,3}(\.[0-9]{1,9})?h"
)
LONG: Final = r"[0-9]{1,9}(\.[0-9]{1,9})?(ms|s|m|)|[0-9]{1,5}(\.[0-9]{1,9})?h"
GO_TIME: Final = r"(([0-9]{1,12}(\.[0-9]{0,9})?|\.[0-9]{1,9})(ns|us|µs|ms|s|m|h))+"
GO_TIME_FORM: Final = text(GO_TIME)
SELECTOR: Final = export_kinds.REQUIREMENT.pattern
ANY_TEXT: Final[Schema] = {"type": ["string", "number"]}
A_WEEK: Final = int(kinds.MAX_DURATION.total_seconds())
TEN_YEARS: Final = int(kinds.MAX_LIFETIME.total_seconds())


def lasting(pattern: str, most: int) -> Schema:
    """A duration as text, or a number of seconds."""
    return {"type": ["string", "number"], "pattern": f"^({pattern})$", "minimum": 0, "maximum": most}


def selector_naming(place: str) -> Schema:
    return text(rf"([A-Za-z0-9_.-]+:[!-~]+|spiffe://.*\{{{place}\}}.*)")


BUCKET: Final[Schema] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["minScore", "priorityClassName"],
    "properties": {
        "minScore": {"type": "number", "minimum": 0, "maximum": 100},
        "priorityClassName": text(DNS_NAME),
    },
}
FORMS: Final[Mapping[SettingKind[Any], Schema]] = {
    kinds.TRUTH: BOOL,
    kinds.PORT: whole(0, 65535),
    kinds.COUNT: whole(0, 9_999_999),
    kinds.PERCENT: whole(0, 100),
    kinds.DURATION: lasting(SHORT, A_WEEK),
    kinds.INTERVAL: {**lasting(SHORT, A_WEEK), "exclusiveMinimum": 0},
    kinds.LIFETIME: {**lasting(LONG, TEN_YEARS), "exclusiveMinimum": 0},
    kinds.NAMESPACE: text(LABEL_NAME),
    kinds.NAME: text(DNS_NAME),
    kinds.OBJECT_NAMES: several(DNS_NAME),
    kinds.SCHEDULERS: several(DNS_NAME),
    kinds.HOSTS: several(r"[0-9A-Za-z.:%-]+"),
    kinds.ATTESTORS: several(r"[A-Za-z0-9_.-]+"),
    kinds.USERS: several(WORD),
    kinds.AUDIENCE: text(WORD),
    kinds.EVIDENCE: several(r"(static|spire-server|jwt-svid)"),
    kinds.URL: text(r"[hH][tT][tT][pP][sS]?://[^\s?#]+"),
    kinds.HTTPS_URL: text(r"https://[^\s?#]+"),
    kinds.ANNOTATION_KEY: text(rf"({DNS_NAME}/)?{LAST_PART}"),
    kinds.RESOURCE: text(rf"{DNS_NAME}/{LAST_PART}"),
    kinds.SOCKET: text(r"unix:([^/].*|/([^/].*)?|///([^/].*)?)"),
    kinds.SPIRE_SERVER: text(r"(unix:.+|.+:[0-9]{1,5})"),
    kinds.TRUST_DOMAIN_NAME: text(r"[a-z0-9._-]{1,255}"),
    kinds.SPIFFE_ID: text(r"spiffe://[a-z0-9._-]{1,255}(/[A-Za-z0-9._-]+)*"),
    kinds.NODE_NAMING: selector_naming("node"),
    kinds.HASH_NAMING: selector_naming("hash"),
    kinds.EVIDENCE_ID: text(r"spiffe://.*\{(node|hash)\}.*\{(node|hash)\}.*"),
    kinds.HASHES: {
        "type": ["object", "string"],
        "pattern": r"^\s*\{",
        "additionalProperties": {"type": "string", "minLength": 1},
    },
    kinds.SCORES: {
        "type": ["object", "string"],
        "pattern": r"^\s*\{",
        "additionalProperties": {"type": "number", "minimum": 0, "maximum": 100},
    },
    kinds.BUCKETS: {"type": ["array", "string"], "pattern": r"^\s*\[", "items": BUCKET},
    export_kinds.GO_DURATION: {
        "type": ["string", "integer"],
        "pattern": f"^(0|{GO_TIME})$",
        "minimum": 0,
        "maximum": 0,
    },
    export_kinds.GO_INTERVAL: GO_TIME_FORM,
    export_kinds.PATIENCE: GO_TIME_FORM,
    export_kinds.ENDPOINT: text(r"[hH][tT][tT][pP][sS]?://[^\s#]+"),
    export_kinds.MIGRATE: {"type": ["boolean", "string"]},
    export_kinds.WORKERS: whole(1, 100),
    export_kinds.BURST: whole(1, 9_999_999),
    export_kinds.RATE: {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1_000_000},
    export_kinds.STORE_PORT: whole(1, 65535),
    export_kinds.SELECTOR: text(rf"(\s*|{SELECTOR}(,{SELECTOR})*)"),
    export_kinds.WORDS: {**ANY_TEXT, "pattern": r"\S"},
    export_kinds.CONTAINER: text(f"({LABEL_NAME})?"),
    export_kinds.EXPORTER_LIST: several(f"({'|'.join(export_kinds.EXPORTERS)})"),
    export_kinds.PARTITION_PATTERN: text(r"[^\x00-\x1f\\]*"),
    export_kinds.LENIENT_LOG_LEVEL: {"type": "string"},
    export_kinds.ROOT_CERTIFICATES: {"type": "string"},
    export_kinds.TEXT: ANY_TEXT,
}
WORDS: Final = re.compile(r"[a-zA-Z_0-9-]+(, [a-zA-Z_0-9-]+)+")


def form_of(kind: SettingKind[Any]) -> Schema:
    """The schema of the setting's values."""
    if kind in FORMS:
        return FORMS[kind]
    if WORDS.fullmatch(kind.allowed):
        return one_of(*kind.allowed.split(", "))
    raise ValueError(f"no schema for this kind of setting: {kind.allowed}")
