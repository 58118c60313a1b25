"""The kinds of values of `gpuwarden export`'s own settings. gpuid is written in Go: where it reads a
setting, the values have Go's syntax."""

import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Final

from webhook.runtime import setting_schemas as schemas
from webhook.runtime.setting_kinds import (
    MAX_COUNT,
    MAX_PORT,
    NAMESPACE_NAME,
    SettingKind,
    one_of,
    read_namespace,
    read_port,
    read_url,
    whole_number,
)

# Go's syntax (time.ParseDuration, strconv.ParseBool), without negative durations.
GO_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
GO_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(ns|us|µs|ms|s|m|h)")
GO_PARTS: Final = rf"({GO_PART.pattern})+"
GO_TRUE: Final = ("1", "t", "T", "TRUE", "true", "True")
GO_FALSE: Final = ("0", "f", "F", "FALSE", "false", "False")
LONGEST: Final = timedelta(days=366)

GPUID_LEVELS: Final = ("debug", "info", "warn", "error")
PARTITION: Final = re.compile(r"[^\x00-\x1f\\]*")

# Kubernetes' selectors, the forms that its clients take: `a=b,c in (d,e),!f`.
LABEL: Final = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_./]{0,315}[A-Za-z0-9])?)"
VALUE: Final = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
REQUIREMENT: Final = re.compile(
    rf"\s*(?:!\s*{LABEL}|{LABEL}(?:\s*(?:==|=|!=)\s*{VALUE}|\s+(?:in|notin)\s*\(\s*{VALUE}(?:\s*,\s*{VALUE})*\s*\))?)\s*"
)


def read_endpoint(text: str) -> str:
    """A URL that may have a query: some stores expect a key there."""
    read_url(text.partition("?")[0])
    if not text.isprintable() or " " in text or "#" in text:
        raise ValueError(f"{text!r} is not an http or https URL")
    return text


def read_go_duration(text: str) -> timedelta:
    if text == "0":
        return timedelta(0)
    parts = GO_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration")
    seconds = sum(float(number) * GO_UNITS[unit] for number, unit in parts)
    if seconds > LONGEST.total_seconds():
        raise ValueError(f"{text!r} is too long")
    return timedelta(seconds=seconds)


def read_go_interval(text: str) -> timedelta:
    duration = read_go_duration(text)
    if not duration:
        raise ValueError(f"{text!r} is 0")
    return duration


def read_patience(text: str) -> timedelta:
    duration = read_go_interval(text)
    if duration > timedelta(minutes=10):
        raise ValueError(f"{text!r} is more than 10m")
    return duration


def read_go_truth(text: str) -> bool:
    if text not in GO_TRUE + GO_FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return text in GO_TRUE


def read_true_or_not(text: str) -> bool:
    """gpuid's migration switch: only `true` turns it on."""
    return text.lower() == "true"


def read_rate(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", text) or float(text) <= 0:
        raise ValueError(f"{text!r} is not a number above 0")
    return float(text)


def read_server_port(text: str) -> int:
    port = read_port(text)
    if 0 < port < 1000:
        raise ValueError(f"{text!r} is below 1000")
    return port


def read_store_port(text: str) -> int:
    port = read_port(text)
    if port == 0:
        raise ValueError("no server listens on port 0")
    return port


def read_selector(text: str) -> str:
    rest = text
    while rest.strip():
        found = REQUIREMENT.match(rest)
        if found is None or not found[0].strip() or (found.end() < len(rest) and rest[found.end()] != ","):
            raise ValueError(f"{text!r} is not a label selector")
        if found.end() == len(rest) - 1:
            raise ValueError(f"{text!r} ends in a comma")
        rest = rest[found.end() + 1 :]
    return text


def read_words(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is empty or not printable")
    return text


def read_container(text: str) -> str:
    return text if text == "" else read_namespace(text)


def exporter_list(names: Iterable[str]) -> SettingKind[tuple[str, ...]]:
    """A list of exporter names. Repeated names are dropped."""
    known = tuple(names)

    def read(text: str) -> tuple[str, ...]:
        parts = tuple(part.strip() for part in text.split(","))
        wrong = [part for part in parts if part not in known]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not an allowed value")
        return tuple(dict.fromkeys(parts))

    return SettingKind(f"a comma list of: {', '.join(known)}", read, list, schemas.comma_list(f"({'|'.join(known)})"))


def read_log_level(text: str) -> str:
    """gpuid reads a level that it does not know as `info`, also those that would suppress errors."""
    return text.lower() if text.lower() in GPUID_LEVELS else "info"


def read_partition(text: str) -> str:
    if not PARTITION.fullmatch(text):
        raise ValueError(f"{text!r} cannot be part of a key")
    return text


def read_text(text: str) -> str:
    return text


GO_DURATION: Final = SettingKind(
    "`90s`, `1m30s`, `500ms`, or 0; at most `168h`",
    read_go_duration,
    schema={**schemas.text(f"(0|{GO_PARTS})"), "type": ["string", "integer"], "minimum": 0, "maximum": 0},
)
GO_INTERVAL: Final = SettingKind(
    "`90s`, `1m30s`, `500ms`; not 0, at most `168h`", read_go_interval, schema=schemas.text(GO_PARTS)
)
PATIENCE: Final = SettingKind("`30s`, `1m30s`; not 0, at most `10m`", read_patience, schema=schemas.text(GO_PARTS))
GO_TRUTH: Final = SettingKind("1, t, true, 0, f, false, also in upper case", read_go_truth)
MIGRATE: Final = SettingKind("`true`; anything else is false", read_true_or_not, schema={"type": ["boolean", "string"]})
ENDPOINT: Final = SettingKind(
    "a URL with http or https, without user or fragment",
    read_endpoint,
    schema=schemas.text(r"[hH][tT][tT][pP][sS]?://[^\s#]+"),
)
WORKERS: Final = whole_number(1, 100, "1 to 100")
RATE: Final = SettingKind(
    "a number above 0",
    read_rate,
    schema={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1_000_000},
)
BURST: Final = whole_number(1, MAX_COUNT, "a whole number, not less than the rate")
SERVER_PORT: Final = SettingKind("1000 to 65535; 0, as a flag, selects a free port", read_server_port)
STORE_PORT: Final = SettingKind("1 to 65535", read_store_port, schema=schemas.whole(1, MAX_PORT))
SELECTOR: Final = SettingKind(
    "a label selector; empty selects every pod",
    read_selector,
    schema=schemas.text(rf"(\s*|{REQUIREMENT.pattern}(,{REQUIREMENT.pattern})*)"),
)
WORDS: Final = SettingKind("printable text, not empty", read_words, schema={**schemas.ANY_TEXT, "pattern": r"\S"})
CONTAINER: Final = SettingKind(
    "the name of a container; empty: the pod's only one",
    read_container,
    schema=schemas.text(f"({NAMESPACE_NAME})?"),
)
LENIENT_LOG_LEVEL: Final = SettingKind(
    "debug, info, warn, error; any other word is info", read_log_level, schema={"type": "string"}
)
PARTITION_PATTERN: Final = SettingKind(
    "text with %Y, %m, %d, %H", read_partition, schema=schemas.text(PARTITION.pattern)
)
DIRECTORY: Final = SettingKind("a directory; created if it does not exist", Path)
TEXT: Final = SettingKind("any text", read_text, schema=schemas.ANY_TEXT)
OBJECT_FORMAT: Final = one_of("csv", "parquet")
# Not FILE: libpq reads the file, for each connection.
ROOT_CERTIFICATES: Final = SettingKind("a file with certificates in PEM", read_text, schema={"type": "string"})
SSL_MODE: Final = one_of("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
