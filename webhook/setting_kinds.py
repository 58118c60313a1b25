"""The kinds of values that settings have: how each is read from text, and what is allowed, in words."""

import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

from attrs import frozen

T = TypeVar("T")

# S4's seven words and what they are to `logging`. Nothing of ours is logged above fatal, so report hides as much.
LOG_LEVELS: Final = {"trace": 5, "debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50, "report": 50}

# Longer is a slip of the keyboard, and added to a date it might leave the calendar.
MAX_DURATION: Final = timedelta(days=7)
DURATION_FORM: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|)")
UNITS: Final = {"ms": "milliseconds", "s": "seconds", "": "seconds", "m": "minutes", "h": "hours"}

# Kubernetes' own rules for names (apimachinery, util/validation).
SUBDOMAIN: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LAST_PART: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]")


@frozen
class Kind(Generic[T]):
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


def read_interval(text: str) -> timedelta:
    duration = read_duration(text)
    if not duration:
        raise ValueError(f"{text!r} is no time at all")
    return duration


def read_host(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError as exc:
        if not SUBDOMAIN.fullmatch(text.lower()):
            raise ValueError(f"{text!r} is neither an address nor a name") from exc
    return text


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


def is_qualified(text: str) -> bool:
    """Whether Kubernetes takes it as the key of an annotation."""
    prefix, slash, name = text.rpartition("/")
    return LAST_PART.fullmatch(name) is not None and (not slash or SUBDOMAIN.fullmatch(prefix) is not None)


def read_annotation_key(text: str) -> str:
    if not is_qualified(text):
        raise ValueError(f"{text!r} is not an annotation key")
    return text


def read_namespace(text: str) -> str:
    if len(text) > 63 or "." in text or not SUBDOMAIN.fullmatch(text):
        raise ValueError(f"{text!r} is not the name of a namespace")
    return text


def read_resource(text: str) -> str:
    # Quota counts it as requests.<name>, which therefore has to be a name too, and may not be one already.
    is_native = "/" not in text or "kubernetes.io/" in text
    if is_native or text.startswith("requests.") or not is_qualified(f"requests.{text}"):
        raise ValueError(f"{text!r} is not an extended resource")
    return text


def read_truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


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
    wrong = [node for node, digest in found.items() if not node or not isinstance(digest, str) or not digest]
    if wrong:
        raise ValueError(f"no hash in text form stands at {', '.join(map(repr, wrong))}")
    return MappingProxyType(found)


def one_of(*words: str, refused: Mapping[str, str] = MappingProxyType({})) -> Kind[str]:
    def read(text: str) -> str:
        if text in refused:
            raise ValueError(f"{text!r} cannot be had: {refused[text]}")
        if text not in words:
            raise ValueError(f"{text!r} is none of the words")
        return text

    return Kind(", ".join(words), read)


def several_of(*words: str, refused: Mapping[str, str]) -> Kind[tuple[str, ...]]:
    one = one_of(*words, refused=refused)

    def read(text: str) -> tuple[str, ...]:
        parts = tuple(one.read(part.strip()) for part in text.split(","))
        if len(set(parts)) < len(parts):
            raise ValueError(f"in {text!r} a word stands twice")
        return parts

    return Kind(f"a comma list of: {one.allowed}", read, list)


PORT: Final = Kind("0 to 65535; 0 picks a free one", read_port)
FILE: Final = Kind("a readable file", read_file)
DURATION: Final = Kind("`500ms`, `90s`, `5m`, `1h`, or a number of seconds; at most `168h`", read_duration)
INTERVAL: Final = Kind(DURATION.allowed + "; not 0", read_interval)
HOST: Final = Kind("an address or a name of this machine", read_host)
URL: Final = Kind("a URL with http or https, without user, query or fragment", read_url)
ANNOTATION_KEY: Final = Kind("an annotation key", read_annotation_key)
NAMESPACE: Final = Kind("the name of a namespace", read_namespace)
RESOURCE: Final = Kind("an extended resource, such as `nvidia.com/gpu`", read_resource)
TRUTH: Final = Kind("true, false", read_truth)
HASHES: Final = Kind("a JSON object, node name to hash", read_hashes, dict)
LOG_LEVEL: Final = one_of(*LOG_LEVELS)
INJECTION: Final = one_of("nvidia", "cuda")
REQUIRE_EVIDENCE: Final = one_of("asked", "all")
LEDGER: Final = one_of("memory", "cluster")
EVIDENCE: Final = several_of(
    "static",
    refused={
        "spire-server": "this version does not ask a SPIRE server",
        "jwt-svid": "this version does not challenge nodes for a JWT-SVID",
    },
)
