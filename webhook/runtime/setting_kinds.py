"""The kinds of values that settings have: how each is read from text, and what is allowed, in words."""

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

from attrs import frozen

from webhook.core.agent_naming import naming_of
from webhook.core.evidence_id import TRUST_DOMAIN, check_template, trust_domain_of
from webhook.core.hashes import hashes_in
from webhook.core.host_paths import mistake_in
from webhook.core.names import is_label_key, is_object_name

T = TypeVar("T")

# S4's seven words and what they are to `logging`. Nothing of ours is logged above fatal, so report hides as much.
LOG_LEVELS: Final = {"trace": 5, "debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50, "report": 50}

# Longer is a slip of the keyboard, and added to a date it might leave the calendar.
MAX_DURATION: Final = timedelta(days=7)
# Of a certificate: ten years.
MAX_LIFETIME: Final = timedelta(hours=87600)
DURATION_FORM: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|)")
UNITS: Final = {"ms": "milliseconds", "s": "seconds", "": "seconds", "m": "minutes", "h": "hours"}

WORD: Final = re.compile(r"[!-+\--~]{1,253}")  # no comma: words stand in lists


@frozen
class SettingKind(Generic[T]):
    """One sort of value: how it is read (`ValueError` says what is wrong), and what is allowed, for people."""

    allowed: str
    read: Callable[[str], T]
    # What YAML may spell out instead of the text: a list or a mapping.
    shape: type[object] | None = None


def read_port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port")
    return int(text)


def read_file(text: str) -> Path:
    if Path(text).is_dir() or not os.access(text, os.R_OK):
        raise ValueError(f"{text!r} is not a file that can be read here")
    return Path(text)


def read_duration(text: str) -> timedelta:
    parts = DURATION_FORM.fullmatch(text)
    if parts is None:
        raise ValueError(f"{text!r} is not a duration")
    duration = timedelta(**{UNITS[parts[2]]: float(parts[1])})
    if duration > MAX_DURATION:
        raise ValueError(f"{text!r} is too long")
    return duration


def read_lifetime(text: str) -> timedelta:
    parts = DURATION_FORM.fullmatch(text)
    if parts is None or float(parts[1]) == 0:
        raise ValueError(f"{text!r} is not a time that something could last")
    hours = float(parts[1]) / {"ms": 3_600_000, "s": 3600, "": 3600, "m": 60, "h": 1}[parts[2]]
    if hours > MAX_LIFETIME.total_seconds() / 3600:
        raise ValueError(f"{text!r} is too long")
    return timedelta(hours=hours)


def read_interval(text: str) -> timedelta:
    duration = read_duration(text)
    if not duration:
        raise ValueError(f"{text!r} is no time at all")
    return duration


def read_host(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError as exc:
        if not is_object_name(text.lower()):
            raise ValueError(f"{text!r} is neither an address nor a name") from exc
    return text


def read_address(text: str) -> str:
    """As Go writes where to listen: `[host]:port`, an IPv6 address in brackets, no host for every address."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise ValueError(f"{text!r} is not an address to listen at")
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
        raise ValueError("more is in the URL than scheme, host, port and path")
    return text


def read_https_url(text: str) -> str:
    if not read_url(text).startswith("https:"):
        raise ValueError(f"{text!r} is not an https URL")
    return text


def read_evidence_id(text: str) -> str:
    try:
        check_template(text)
    except ValueError as exc:
        raise ValueError(f"{text!r} is no form for the IDs of evidence: {exc}") from exc
    return text


def read_node(text: str) -> str:
    if not is_object_name(text):
        raise ValueError(f"{text!r} is not the name of a node")
    return text


def read_annotation_key(text: str) -> str:
    if not is_label_key(text):
        raise ValueError(f"{text!r} is not an annotation key")
    return text


def read_label_key(text: str) -> str:
    if not is_label_key(text):
        raise ValueError(f"{text!r} is not a label key")
    return text


def read_namespace(text: str) -> str:
    if len(text) > 63 or "." in text or not is_object_name(text):
        raise ValueError(f"{text!r} is not the name of a namespace")
    return text


def read_name(text: str) -> str:
    if not is_object_name(text):
        raise ValueError(f"{text!r} is not the name of an object")
    return text


def read_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(read_name(part.strip()) for part in text.split(",")))


def read_hosts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(read_host(part.strip()) for part in text.split(",")))


def read_host_paths(text: str) -> tuple[str, ...]:
    paths = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for path in paths:
        if (mistake := mistake_in(path)) is not None:
            raise ValueError(f"{path!r}: {mistake}")
    return paths


def read_directory(text: str) -> Path:
    if Path(text).exists() and not Path(text).is_dir():
        raise ValueError(f"{text!r} is not a directory")
    return Path(text)


def read_resource(text: str) -> str:
    # Quota counts it as requests.<name>, which therefore has to be a name too, and may not be one already.
    is_native = "/" not in text or "kubernetes.io/" in text
    if is_native or text.startswith("requests.") or not is_label_key(f"requests.{text}"):
        raise ValueError(f"{text!r} is not an extended resource")
    return text


def read_truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def read_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text):
        raise ValueError(f"{text!r} is not a count")
    return int(text)


def read_percent(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", text) or int(text) > 100:
        raise ValueError(f"{text!r} is no percentage")
    return int(text)


def read_word(text: str) -> str:
    if not WORD.fullmatch(text):
        raise ValueError(f"{text!r} is not one printable word")
    return text


def read_users(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(read_word(part.strip()) for part in text.split(",")))


def read_schedulers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if not is_object_name(name):
            raise ValueError(f"{name!r} is not the name of a scheduler")
    return names


def read_socket(text: str) -> str:
    """`unix:/a` and `unix:///a` are one thing."""
    path = text.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if path == text or not path or path.startswith("//") or not path.isprintable():
        raise ValueError(f"{text!r} is not a unix socket")
    return f"unix:{path}"


def read_trust_domain(text: str) -> str:
    if not TRUST_DOMAIN.fullmatch(text):
        raise ValueError(f"{text!r} is not the name of a trust domain")
    return text


def read_spiffe_id(text: str) -> str:
    if trust_domain_of(text) is None:
        raise ValueError(f"{text!r} is not a SPIFFE ID")
    return text


def read_spire_server(text: str) -> str:
    if text.startswith("unix:"):
        return read_socket(text)
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (bare == host and ":" in host) or not read_port(port):
        raise ValueError(f"{text!r} is not HOST:PORT")
    read_host(bare)
    return text


def read_attestors(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    wrong = [part for part in parts if not re.fullmatch(r"[A-Za-z0-9_.-]+", part)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not the name of an attestor")
    return tuple(dict.fromkeys(parts))


def read_node_naming(text: str) -> str:
    naming_of(text, "node")
    return text


def read_hash_naming(text: str) -> str:
    naming_of(text, "hash")
    return text


def once_only(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses what JSON would settle in silence: two hashes for one node."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a node stands twice")
    return found


def read_hashes(text: str) -> Mapping[str, str]:
    try:
        found = json.loads(text, object_pairs_hook=once_only)
    except (json.JSONDecodeError, RecursionError) as exc:
        raise ValueError("this is not JSON") from exc
    if not isinstance(found, dict):
        raise ValueError("this is not a JSON object")  # noqa: TRY004 - a mistake in a value, as the others are
    wrong = [node for node, digest in found.items() if not node or not is_hash(digest)]
    if wrong:
        raise ValueError(f"no hash that a pod can ask for stands at {', '.join(map(repr, wrong))}")
    return MappingProxyType(found)


def is_hash(found: object) -> bool:
    return isinstance(found, str) and hashes_in(found, "") == ((found,), [])


def read_buckets(text: str) -> tuple[Mapping[str, object], ...]:
    found = json_of(text)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("this is not a JSON list of objects")
    return tuple(map(read_bucket, found))


def read_bucket(found: Mapping[str, object]) -> Mapping[str, object]:
    score, name = found.get("minScore"), found.get("priorityClassName")
    if set(found) != {"minScore", "priorityClassName"} or not is_score(score) or not isinstance(name, str):
        raise ValueError(f"{json.dumps(found)} is no bucket")
    if not is_object_name(name):
        raise ValueError(f"{name!r} is not the name of a priority class")
    return {"minScore": score, "priorityClassName": name}


def read_scores(text: str) -> Mapping[str, float]:
    found = json_of(text)
    if not isinstance(found, dict) or not all(map(is_score, found.values())):
        raise ValueError("this is not a JSON object of scores from 0 to 100")
    return MappingProxyType(found)


def is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100


def json_of(text: str) -> object:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as exc:
        raise ValueError("this is not JSON") from exc


def one_of(*words: str, refused: Mapping[str, str] = MappingProxyType({})) -> SettingKind[str]:
    def read(text: str) -> str:
        if text in refused:
            raise ValueError(f"{text!r} cannot be had: {refused[text]}")
        if text not in words:
            raise ValueError(f"{text!r} is none of the words")
        return text

    return SettingKind(", ".join(words), read)


def several_of(*words: str, refused: Mapping[str, str]) -> SettingKind[tuple[str, ...]]:
    one = one_of(*words, refused=refused)

    def read(text: str) -> tuple[str, ...]:
        parts = tuple(one.read(part.strip()) for part in text.split(","))
        if len(set(parts)) < len(parts):
            raise ValueError(f"in {text!r} a word stands twice")
        return parts

    return SettingKind(f"a comma list of: {one.allowed}", read, list)


PORT: Final = SettingKind("0 to 65535; 0 picks a free one", read_port)
FILE: Final = SettingKind("a readable file", read_file)
DURATION: Final = SettingKind("`500ms`, `90s`, `5m`, `1h`, or a number of seconds; at most `168h`", read_duration)
INTERVAL: Final = SettingKind(DURATION.allowed + "; not 0", read_interval)
HOST: Final = SettingKind("an address or a name of this machine", read_host)
ADDRESS: Final = SettingKind("`host:port`, or `:port` for no host in particular", read_address)
URL: Final = SettingKind("a URL with http or https, without user, query or fragment", read_url)
ANNOTATION_KEY: Final = SettingKind("an annotation key", read_annotation_key)
LABEL_KEY: Final = SettingKind("a label key", read_label_key)
NAMESPACE: Final = SettingKind("the name of a namespace", read_namespace)
RESOURCE: Final = SettingKind("an extended resource, such as `nvidia.com/gpu`", read_resource)
COUNT: Final = SettingKind("a whole number, 0 to 9999999", read_count)
PERCENT: Final = SettingKind("a whole number, 0 to 100", read_percent)
AUDIENCE: Final = SettingKind("one printable word", read_word)
USERS: Final = SettingKind(
    "a comma list of user names, such as `system:serviceaccount:kube-system:apiserver-webhook`", read_users, list
)
SCHEDULERS: Final = SettingKind("a comma list of names that pods may have in `schedulerName`", read_schedulers, list)
SOCKET: Final = SettingKind("`unix:PATH` or `unix:///PATH`", read_socket)
TRUST_DOMAIN_NAME: Final = SettingKind("the name of a trust domain, such as `example.org`", read_trust_domain)
SPIFFE_ID: Final = SettingKind("a SPIFFE ID", read_spiffe_id)
SPIRE_SERVER: Final = SettingKind("`HOST:PORT`, or `unix:PATH` for tests", read_spire_server)
ATTESTORS: Final = SettingKind("a comma list of node attestors, such as `x509pop,tpm_devid`", read_attestors, list)
NODE_NAMING: Final = SettingKind(
    "`TYPE:PREFIX` of a selector, or an agent's SPIFFE ID with `{node}` in the place of the name", read_node_naming
)
HASH_NAMING: Final = SettingKind(
    "`TYPE:PREFIX` of a selector, or an agent's SPIFFE ID with `{hash}` in the place of the hash", read_hash_naming
)
TRUTH: Final = SettingKind("true, false", read_truth)
HASHES: Final = SettingKind("a JSON object, node name to hash", read_hashes, dict)
BUCKETS: Final = SettingKind(
    "a JSON list of `{minScore, priorityClassName}`, scores from 0 to 100", read_buckets, Sequence
)
SCORES: Final = SettingKind("a JSON object, tenant to score from 0 to 100", read_scores, dict)
LOG_LEVEL: Final = one_of(*LOG_LEVELS)
INJECTION: Final = one_of("nvidia", "cuda")
MAP_VISIBLE: Final = one_of("uuid", "index")
WHEN_UNAVAILABLE: Final = one_of("deny", "queue")
REQUIRE_EVIDENCE: Final = one_of("asked", "all")
ON_BIND_DEADLINE: Final = one_of("remove", "keep")
ON_EVIDENCE_LOST: Final = one_of("report", "taint", "evict")
LEDGER: Final = one_of("memory", "cluster")
EVIDENCE: Final = several_of(
    "static",
    "spire-server",
    "jwt-svid",
    refused={},
)
HTTPS_URL: Final = SettingKind("a URL with https, without user, query or fragment", read_https_url)
BUNDLE_PROFILE: Final = one_of("https_web", "https_spiffe")
EVIDENCE_ID: Final = SettingKind(
    "a SPIFFE ID with {node} and {hash} in segments of their own, and {trust_domain} or the trust domain itself",
    read_evidence_id,
)
NODE: Final = SettingKind("the name of a node", read_node)
LIFETIME: Final = SettingKind("`90s`, `5m`, `2160h`, or a number of seconds; not 0, at most `87600h`", read_lifetime)
NAME: Final = SettingKind("the name of an object", read_name)
OBJECT_NAMES: Final = SettingKind("a comma list of names of objects", read_names, list)
HOSTS: Final = SettingKind("a comma list of addresses and DNS names", read_hosts, list)
HOST_PATHS: Final = SettingKind(
    "a comma list of absolute paths of nodes, where neither devices, sockets, programs nor keys are",
    read_host_paths,
    list,
)
DIRECTORY: Final = SettingKind("a directory, made if it is not there", read_directory)
