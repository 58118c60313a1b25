"""The kinds of setting values: how each is read from text, the rule in words, and the JSON schema of the chart."""

import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

from attrs import field, frozen

from webhook.core.agent_naming import naming_of
from webhook.core.evidence_id import TRUST_DOMAIN, check_template, trust_domain_of
from webhook.core.hashes import hashes_in
from webhook.core.host_paths import HOST_PATH, mistake_in
from webhook.core.names import LABEL, MAX_LABEL, SUBDOMAIN, is_label_key, is_object_name
from webhook.runtime import setting_schemas as schemas
from webhook.runtime.setting_schemas import Schema

T = TypeVar("T")

# The seven levels of the GPU Device Assigner, as numbers of `logging`. gpuwarden logs nothing above fatal, so report
# suppresses as much as fatal.
LOG_LEVELS: Final = {"trace": 5, "debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50, "report": 50}

# A longer duration is probably a typing error, and added to a date it could exceed the calendar.
MAX_DURATION: Final = timedelta(days=7)
# Of a certificate: ten years.
MAX_LIFETIME: Final = timedelta(hours=87600)
DURATION_PATTERN: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|)")
UNITS: Final = {"ms": "milliseconds", "s": "seconds", "": "seconds", "m": "minutes", "h": "hours"}
UNITS_PER_HOUR: Final = {"ms": 3_600_000, "s": 3600, "": 3600, "m": 60, "h": 1}

MAX_PORT: Final = 65535
MAX_COUNT: Final = 9_999_999
PRINTABLE: Final = r"[!-+.-~-]{1,253}"  # no comma: it separates items of a list
ATTESTOR: Final = r"[A-Za-z0-9_.-]+"
NAMESPACE_NAME: Final = rf"[a-z0-9]([-a-z0-9]{{0,{MAX_LABEL - 2}}}[a-z0-9])?"


@frozen
class SettingKind(Generic[T]):
    """One kind of value. `read` raises ValueError with what is wrong; `allowed` is the rule for users."""

    allowed: str
    read: Callable[[str], T]
    # What YAML may contain instead of the text: a list or a mapping.
    shape: type[object] | None = None
    # What the chart accepts. None: the chart has no value of this kind.
    schema: Schema | None = field(default=None, eq=False)


# Readers.


def text_that(is_valid: Callable[[str], object], what: str) -> Callable[[str], str]:
    """Reads a text as it is, if it is valid."""

    def read(text: str) -> str:
        if not is_valid(text):
            raise ValueError(f"{text!r} is not {what}")
        return text

    return read


def is_namespace_name(text: str) -> bool:
    return len(text) <= MAX_LABEL and "." not in text and is_object_name(text)


def is_extended_resource(text: str) -> bool:
    # A ResourceQuota counts it as requests.<name>, so that has to be a valid name too.
    is_native = "/" not in text or "kubernetes.io/" in text
    return not is_native and not text.startswith("requests.") and is_label_key(f"requests.{text}")


read_namespace: Final = text_that(is_namespace_name, "the name of a namespace")
read_printable: Final = text_that(re.compile(PRINTABLE).fullmatch, "one printable word")
read_attestor: Final = text_that(re.compile(ATTESTOR).fullmatch, "the name of an attestor")


def read_port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > MAX_PORT:
        raise ValueError(f"{text!r} is not a port")
    return int(text)


def read_file(text: str) -> Path:
    if Path(text).is_dir() or not os.access(text, os.R_OK):
        raise ValueError(f"{text!r} is not a readable file")
    return Path(text)


def read_directory(text: str) -> Path:
    if Path(text).exists() and not Path(text).is_dir():
        raise ValueError(f"{text!r} is not a directory")
    return Path(text)


def read_duration(text: str) -> timedelta:
    parts = DURATION_PATTERN.fullmatch(text)
    if parts is None:
        raise ValueError(f"{text!r} is not a duration")
    duration = timedelta(**{UNITS[parts[2]]: float(parts[1])})
    if duration > MAX_DURATION:
        raise ValueError(f"{text!r} is too long")
    return duration


def read_interval(text: str) -> timedelta:
    duration = read_duration(text)
    if not duration:
        raise ValueError(f"{text!r} is 0")
    return duration


def read_lifetime(text: str) -> timedelta:
    parts = DURATION_PATTERN.fullmatch(text)
    if parts is None or float(parts[1]) == 0:
        raise ValueError(f"{text!r} is not a duration above 0")
    hours = float(parts[1]) / UNITS_PER_HOUR[parts[2]]
    if hours > MAX_LIFETIME.total_seconds() / 3600:
        raise ValueError(f"{text!r} is too long")
    return timedelta(hours=hours)


def read_host(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError as exc:
        if not is_object_name(text.lower()):
            raise ValueError(f"{text!r} is neither an IP address nor a host name") from exc
    return text


def read_address(text: str) -> str:
    """A listen address as Go writes it: `[host]:port`, an IPv6 address in brackets, no host for every address."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise ValueError(f"{text!r} is not a listen address")
    read_port(port)
    if host:
        read_host(host.strip("[]"))
    return text


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_url(text: str) -> str:
    try:
        url = urlsplit(text)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError as exc:
        raise ValueError(f"{text!r} is not a URL") from exc
    if not is_url or not text.isprintable() or " " in text:
        raise ValueError(f"{text!r} is not an http or https URL")
    if url.username is not None or url.query or url.fragment:
        # The value is not shown: a user part may be a password.
        raise ValueError("the URL has more than scheme, host, port and path")
    return text


def read_https_url(text: str) -> str:
    if not read_url(text).startswith("https:"):
        raise ValueError(f"{text!r} is not an https URL")
    return text


def read_evidence_id(text: str) -> str:
    try:
        check_template(text)
    except ValueError as exc:
        raise ValueError(f"{text!r} is not a template of SPIFFE IDs: {exc}") from exc
    return text


def listed(read_item: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Reads a list with commas; an item that is there twice counts once."""

    def read(text: str) -> tuple[T, ...]:
        return tuple(dict.fromkeys(read_item(item.strip()) for item in text.split(",")))

    return read


def read_host_path(text: str) -> str:
    if (mistake := mistake_in(text)) is not None:
        raise ValueError(f"{text!r}: {mistake}")
    return text


def read_boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def read_socket(text: str) -> str:
    """`unix:/a` and `unix:///a` name the same socket."""
    path = text.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if path == text or not path or path.startswith("//") or not path.isprintable():
        raise ValueError(f"{text!r} is not a unix socket")
    return f"unix:{path}"


def read_server(text: str) -> str:
    if text.startswith("unix:"):
        return read_socket(text)
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (bare == host and ":" in host) or not read_port(port):
        raise ValueError(f"{text!r} is not HOST:PORT")
    read_host(bare)
    return text


def read_node_naming(text: str) -> str:
    naming_of(text, "node")
    return text


def read_hash_naming(text: str) -> str:
    naming_of(text, "hash")
    return text


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses an object with two hashes for one node. JSON would use the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a node has two hashes")
    return found


def read_hashes(text: str) -> Mapping[str, str]:
    try:
        found = json.loads(text, object_pairs_hook=without_duplicates)
    except (json.JSONDecodeError, RecursionError) as exc:
        raise ValueError("not valid JSON") from exc
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - a mistake in a value, as the others are
    wrong = [node for node, digest in found.items() if not node or not is_hash(digest)]
    if wrong:
        raise ValueError(f"no valid hash for {', '.join(map(repr, wrong))}")
    return MappingProxyType(found)


def is_hash(found: object) -> bool:
    """Whether a pod can ask for it."""
    return isinstance(found, str) and hashes_in(found, "") == ((found,), [])


def read_buckets(text: str) -> tuple[Mapping[str, object], ...]:
    found = json_of(text)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("not a JSON list of objects")
    return tuple(map(read_bucket, found))


def read_bucket(found: Mapping[str, object]) -> Mapping[str, object]:
    score, name = found.get("minScore"), found.get("priorityClassName")
    if set(found) != {"minScore", "priorityClassName"} or not is_score(score) or not isinstance(name, str):
        raise ValueError(f"{json.dumps(found)} is not a bucket")
    if not is_object_name(name):
        raise ValueError(f"{name!r} is not the name of a priority class")
    return {"minScore": score, "priorityClassName": name}


def read_scores(text: str) -> Mapping[str, float]:
    found = json_of(text)
    if not isinstance(found, dict) or not all(map(is_score, found.values())):
        raise ValueError("not a JSON object of scores from 0 to 100")
    return MappingProxyType(found)


def is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100


def json_of(text: str) -> object:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as exc:
        raise ValueError("not valid JSON") from exc


# Kinds that differ by their words or bounds.


def one_of(*words: str) -> SettingKind[str]:
    return SettingKind(
        ", ".join(words), text_that(words.__contains__, "an allowed value"), schema=schemas.one_of(*words)
    )


def several_of(*words: str) -> SettingKind[tuple[str, ...]]:
    one = one_of(*words)

    def read(text: str) -> tuple[str, ...]:
        parts = tuple(one.read(part.strip()) for part in text.split(","))
        if len(set(parts)) < len(parts):
            raise ValueError(f"{text!r} has a value twice")
        return parts

    return SettingKind(f"a comma list of: {one.allowed}", read, list, schemas.comma_list(f"({'|'.join(words)})"))


def whole_number(least: int, most: int, allowed: str | None = None) -> SettingKind[int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,7}", text) or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return SettingKind(allowed or f"a whole number, {least} to {most}", read, schema=schemas.whole(least, most))


def naming(place: str) -> Schema:
    return schemas.text(rf"([A-Za-z0-9_.-]+:[!-~]+|spiffe://.*\{{{place}\}}.*)")


BUCKET: Final[Schema] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["minScore", "priorityClassName"],
    "properties": {
        "minScore": {"type": "number", "minimum": 0, "maximum": 100},
        "priorityClassName": schemas.text(SUBDOMAIN.pattern),
    },
}
QUALIFIED_NAME: Final = rf"({SUBDOMAIN.pattern}/)?{LABEL.pattern}"

PORT: Final = SettingKind("0 to 65535; 0 selects a free port", read_port, schema=schemas.whole(0, MAX_PORT))
COUNT: Final = whole_number(0, MAX_COUNT)
PERCENT: Final = whole_number(0, 100)
BOOLEAN: Final = SettingKind("true, false", read_boolean, schema=schemas.BOOLEAN)
FILE: Final = SettingKind("a readable file", read_file)
DIRECTORY: Final = SettingKind("a directory; created if it does not exist", read_directory)
DURATION: Final = SettingKind(
    "`500ms`, `90s`, `5m`, `1h`, or a number of seconds; at most `168h`",
    read_duration,
    schema=schemas.duration(MAX_DURATION, may_be_zero=True),
)
INTERVAL: Final = SettingKind(
    DURATION.allowed + "; not 0", read_interval, schema=schemas.duration(MAX_DURATION, may_be_zero=False)
)
LIFETIME: Final = SettingKind(
    "`90s`, `5m`, `2160h`, or a number of seconds; not 0, at most `87600h`",
    read_lifetime,
    schema=schemas.duration(MAX_LIFETIME, may_be_zero=False),
)
HOST: Final = SettingKind("an IP address or a host name of this machine", read_host)
HOSTS: Final = SettingKind(
    "a comma list of IP addresses and DNS names",
    listed(read_host),
    list,
    schemas.comma_list(r"[0-9A-Za-z.:%-]+"),
)
ADDRESS: Final = SettingKind("`host:port`, or `:port` without a host", read_address)
URL: Final = SettingKind(
    "a URL with http or https, without user, query or fragment",
    read_url,
    schema=schemas.text(r"[hH][tT][tT][pP][sS]?://[^\s?#]+"),
)
HTTPS_URL: Final = SettingKind(
    "a URL with https, without user, query or fragment", read_https_url, schema=schemas.text(r"https://[^\s?#]+")
)
ANNOTATION_KEY: Final = SettingKind(
    "an annotation key", text_that(is_label_key, "an annotation key"), schema=schemas.text(QUALIFIED_NAME)
)
LABEL_KEY: Final = SettingKind(
    "a label key", text_that(is_label_key, "a label key"), schema=schemas.text(QUALIFIED_NAME)
)
RESOURCE: Final = SettingKind(
    "an extended resource, such as `nvidia.com/gpu`",
    text_that(is_extended_resource, "an extended resource"),
    schema=schemas.text(f"{SUBDOMAIN.pattern}/{LABEL.pattern}"),
)
NAMESPACE: Final = SettingKind("the name of a namespace", read_namespace, schema=schemas.text(NAMESPACE_NAME))
NAME: Final = SettingKind(
    "the name of an object", text_that(is_object_name, "the name of an object"), schema=schemas.text(SUBDOMAIN.pattern)
)
NODE: Final = SettingKind("the name of a node", text_that(is_object_name, "the name of a node"))
OBJECT_NAMES: Final = SettingKind(
    "a comma list of names of objects", listed(NAME.read), list, schemas.comma_list(SUBDOMAIN.pattern)
)
AUDIENCE: Final = SettingKind("one printable word", read_printable, schema=schemas.text(PRINTABLE))
USERS: Final = SettingKind(
    "a comma list of user names, such as `system:serviceaccount:kube-system:apiserver-webhook`",
    listed(read_printable),
    list,
    schemas.comma_list(PRINTABLE),
)
SOCKET: Final = SettingKind(
    "`unix:PATH` or `unix:///PATH`", read_socket, schema=schemas.text(r"unix:([^/].*|/([^/].*)?|///([^/].*)?)")
)
TRUST_DOMAIN_NAME: Final = SettingKind(
    "the name of a trust domain, such as `example.org`",
    text_that(TRUST_DOMAIN.fullmatch, "the name of a trust domain"),
    schema=schemas.text(TRUST_DOMAIN.pattern),
)
SPIFFE_ID: Final = SettingKind(
    "a SPIFFE ID",
    text_that(trust_domain_of, "a SPIFFE ID"),
    schema=schemas.text(rf"spiffe://{TRUST_DOMAIN.pattern}(/[A-Za-z0-9._-]+)*"),
)
SERVER: Final = SettingKind(
    "`HOST:PORT`, or `unix:PATH` for tests", read_server, schema=schemas.text(r"(unix:.+|.+:[0-9]{1,5})")
)
ATTESTORS: Final = SettingKind(
    "a comma list of node attestors, such as `x509pop,tpm_devid`",
    listed(read_attestor),
    list,
    schemas.comma_list(ATTESTOR),
)
NODE_NAMING: Final = SettingKind(
    "`TYPE:PREFIX` of a selector, or an agent's SPIFFE ID with `{node}` for the node's name",
    read_node_naming,
    schema=naming("node"),
)
HASH_NAMING: Final = SettingKind(
    "`TYPE:PREFIX` of a selector, or an agent's SPIFFE ID with `{hash}` for the hash",
    read_hash_naming,
    schema=naming("hash"),
)
EVIDENCE_ID: Final = SettingKind(
    "a SPIFFE ID with {node} and {hash} as separate segments, and {trust_domain} or the name of the trust domain",
    read_evidence_id,
    schema=schemas.text(r"spiffe://.*\{(node|hash)\}.*\{(node|hash)\}.*"),
)
HASHES: Final = SettingKind(
    "a JSON object, node name to hash", read_hashes, dict, schemas.json_object({"type": "string", "minLength": 1})
)
BUCKETS: Final = SettingKind(
    "a JSON list of `{minScore, priorityClassName}`, scores from 0 to 100",
    read_buckets,
    Sequence,
    schemas.json_list(BUCKET),
)
SCORES: Final = SettingKind(
    "a JSON object, tenant to score from 0 to 100",
    read_scores,
    dict,
    schemas.json_object({"type": "number", "minimum": 0, "maximum": 100}),
)
HOST_PATHS: Final = SettingKind(
    "a comma list of absolute paths of nodes, not of directories with devices, sockets, programs or keys",
    listed(read_host_path),
    list,
    schemas.comma_list(HOST_PATH),
)
LOG_LEVEL: Final = one_of(*LOG_LEVELS)
INJECTION: Final = one_of("nvidia", "cuda", "plugin", "dra")
RESERVE: Final = one_of("create", "bind")
MAP_VISIBLE: Final = one_of("uuid", "index")
WHEN_UNAVAILABLE: Final = one_of("deny", "queue")
REQUIRE_EVIDENCE: Final = one_of("asked", "all")
ON_BIND_DEADLINE: Final = one_of("remove", "keep")
ON_EVIDENCE_LOST: Final = one_of("report", "taint", "evict")
ON_MISMATCH: Final = one_of("report", "evict")
LEDGER: Final = one_of("memory", "cluster")
BUNDLE_PROFILE: Final = one_of("https_web", "https_spiffe")
