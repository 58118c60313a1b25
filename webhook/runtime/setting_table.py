"""A table of settings: how a setting is declared, its names, and how a table is read from flags, variables and a YAML
file.

Every source is read as text, so the same rules apply to all three. Only this module reads the environment.
"""

import difflib
import json
import os
import re
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from attrs import NOTHING, field, fields, frozen

from webhook.core.errors import GpuwardenError
from webhook.runtime.setting_kinds import SettingKind, read_file

PREFIX: Final = "GPUWARDEN_"
EXPORT_PREFIX: Final = "GPUWARDEN_EXPORT_"

# A Service called gpuwarden adds variables such as GPUWARDEN_PORT=tcp://10.0.0.1:443 to every Pod of its namespace.
SERVICE_LINK: Final = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)\Z")
SERVICE_LINK_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")


class Command(StrEnum):
    """The commands that read settings, by the words after `gpuwarden`."""

    SERVE = "serve"
    RECONCILE = "reconcile"
    ATTEST = "attest"
    EXPORT = "export"
    HISTORY = "history"
    SCORE = "score"
    EXPLAIN = "explain"
    AUDIT = "audit"
    RELEASE = "release"
    CERTS_ENSURE = "certs ensure"
    CERTS_KEEP = "certs keep"


Commands = frozenset[Command]


class SettingsError(GpuwardenError):
    """The settings are invalid; the error lists every mistake."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("; ".join(self.mistakes))


def setting(
    default: Any,
    kind: SettingKind[Any],
    commands: Commands,
    about: str,
    *,
    short: str | None = None,
    older_variable: str | None = None,
    in_file: bool = True,
    is_secret: bool = False,
    older_is_lenient: bool = False,
    older_may_be_empty: bool = False,
) -> Any:
    """A field that is a setting. The default NOTHING makes it required.

    `commands` read the setting: they have its flag. An `older_variable` is the name in an older system, read when ours
    is not set. If that system is lenient, a bad value there is ignored with a note; if it may be empty there, empty is
    a value. A secret has no flag: every user of the machine could read it.
    """
    metadata = {
        "kind": kind,
        "commands": commands,
        "about": about,
        "short": short,
        "older_variable": older_variable,
        "in_file": in_file,
        "is_secret": is_secret,
        "older_is_lenient": older_is_lenient,
        "older_may_be_empty": older_may_be_empty,
    }
    return field(default=default, repr=not is_secret, metadata=metadata)


@frozen
class Setting:
    """One setting as it is declared, with its names."""

    name: str
    default: object
    kind: SettingKind[Any]
    commands: Commands
    about: str
    short: str | None
    older_variable: str | None
    in_file: bool
    is_secret: bool
    older_is_lenient: bool
    older_may_be_empty: bool
    prefix: str = PREFIX
    # The field has no default.
    is_required: bool = False

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        return self.prefix + self.name.upper()

    @property
    def key(self) -> str:
        return key_of(self.name)

    @property
    def variables(self) -> Iterator[str]:
        yield self.variable
        if self.older_variable:
            yield self.older_variable


def settings_of(declaring: type, prefix: str = PREFIX, group: str = "") -> tuple[Setting, ...]:
    """The settings that the fields of a class declare. Their names begin with `group`."""
    return tuple(
        Setting(
            group + one.name,
            None if one.default is NOTHING else one.default,
            **one.metadata,
            prefix=prefix,
            is_required=one.default is NOTHING,
        )
        for one in fields(declaring)
        if one.metadata
    )


class Retired(NamedTuple):
    """A flag of the older webhook that `serve` accepts; it does nothing."""

    name: str
    short: str
    sentence: str

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def add_table(parser: ArgumentParser, table: Sequence[Setting], command: Command | None = None) -> None:
    """Adds the flags of the settings that the command reads; without a command, of all.

    argparse checks no value: a `TableReader` reports all mistakes at once.
    """
    for one in table:
        if one.is_secret or not is_read_by(command, one):
            continue
        names = [one.flag, *([f"-{one.short}"] if one.short else [])]
        text = f"{one.about}; {one.kind.allowed.replace('`', '')}"
        shown = plain(one.default)
        text += "" if shown in (None, {}) else f" (default: {in_words(shown)})"
        # argparse takes a percent sign in its texts for the start of a format.
        metavar = one.name.rpartition("_")[2].upper()
        parser.add_argument(*names, dest=one.name, metavar=metavar, help=text.replace("%", "%%"))


def add_retired(parser: ArgumentParser, retired: Sequence[Retired]) -> None:
    for flag in retired:
        parser.add_argument(flag.flag, f"-{flag.short}", dest=flag.name, help=SUPPRESS)


def add_replaced(parser: ArgumentParser, replaced: Iterable[str]) -> None:
    """Adds the flags of settings that are gone, so that a `TableReader` can name what replaces them."""
    for name in replaced:
        parser.add_argument(flag_of(name), dest=name, help=SUPPRESS)


def is_read_by(command: Command | None, one: Setting) -> bool:
    """Whether the command reads the setting; None stands for all commands together."""
    return command is None or command in one.commands


def process_environment() -> Mapping[str, str]:
    return os.environ  # noqa: TID251 - the only place that may read it


class Given(NamedTuple):
    """The text of a setting, and where it is set."""

    text: str
    source: str


class StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys. YAML would use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {min(twice)!r}", node.start_mark)
        return super().construct_mapping(node, deep)


class TableReader:
    """Reads a table of settings once and collects the mistakes.

    `replaced` are the names of settings that are gone, each with a sentence that names what replaces it.
    Variables that begin with one of `other_prefixes` belong to other tables.
    """

    table: tuple[Setting, ...] = ()
    replaced: Mapping[str, str] = {}
    prefix = PREFIX
    other_prefixes: tuple[str, ...] = ()

    def __init__(
        self,
        flags: Mapping[str, object],
        environ: Mapping[str, str],
        also: Iterable[str],
        command: Command | None = None,
    ) -> None:
        self.flags = flags
        self._command = command
        self.environ = {name: text for name, text in environ.items() if not is_service_link(name, text)}
        self.mistakes = list(also)
        self.ignored: list[str] = []
        self.given: dict[str, Given] = {}

    def read_values(self) -> dict[str, Any]:
        """The values that are set. Raises SettingsError with every mistake."""
        self.given = self._from_variables() | self._from_flags()
        self.given = self._from_file() | self.given
        self._check_replaced()
        values = dict(self._values())
        self._check_names()
        self.check_together(values)
        if self.mistakes:
            raise SettingsError(self.mistakes)
        return values

    def check_together(self, values: Mapping[str, Any]) -> None:
        """Adds the mistakes between settings that are valid by themselves."""

    def reads(self, name: str) -> bool:
        """Whether the command reads the setting: no rule asks for a flag that the command does not have."""
        return any(one.name == name and is_read_by(self._command, one) for one in self.table)

    def sources(self) -> dict[str, str]:
        """Where each setting is set."""
        return {one.name: self.given[one.name].source if one.name in self.given else "default" for one in self.table}

    def _from_flags(self) -> dict[str, Given]:
        return {
            one.name: Given(str(value), f"flag {one.flag}")
            for one in self.table
            if (value := self.flags.get(one.name)) is not None
        }

    def _from_variables(self) -> dict[str, Given]:
        return {
            one.name: Given(self.environ[name], f"variable {name}")
            for one in self.table
            for name in reversed(tuple(one.variables))
            if self._is_set(one, name)
        }

    def _is_set(self, one: Setting, name: str) -> bool:
        may_be_empty = one.older_may_be_empty and name == one.older_variable
        return name in self.environ and (may_be_empty or self.environ[name] != "")

    def _from_file(self) -> dict[str, Given]:
        named = self.given.get("config")
        if named is None:
            return {}
        content = self._content(named)
        by_key = {one.key: one for one in self.table if one.in_file}
        replaced: dict[object, str] = {key_of(name): sentence for name, sentence in self.replaced.items()}
        found = {}
        for key, value in content.items():
            where = f"key {key} in {named.text}"
            one = by_key.get(str(key))
            if one is None and key in replaced:
                self.mistakes.append(f"{where}: {replaced[key]}")
            elif one is None:
                self.mistakes.append(f"{where}: unknown setting{did_you_mean(str(key), by_key)}")
            elif value is not None:
                try:
                    found[one.name] = Given(text_of(value, one.kind.shape), where)
                except ValueError as exc:
                    self.mistakes.append(f"{where}: {exc}; allowed: {one.kind.allowed}")
        return found

    def _content(self, named: Given) -> Mapping[object, object]:
        """The content of the file. An unreadable file is reported later, when `config` is read like other settings."""
        try:
            content = yaml.load(read_file(named.text).read_bytes(), StrictLoader)  # noqa: S506 - a SafeLoader
        except (ValueError, OSError):
            return {}
        except (yaml.YAMLError, RecursionError) as exc:
            self.mistakes.append(f"{named.source}: {named.text} is not YAML: {' '.join(str(exc).split())}")
            return {}
        if content is None:
            return {}
        if not isinstance(content, dict):
            self.mistakes.append(f"{named.source}: {named.text} is not a mapping of settings")
            return {}
        return content

    def _values(self) -> Iterator[tuple[str, Any]]:
        for one in self.table:
            if one.name in self.given:
                text, source = self.given[one.name]
                try:
                    yield one.name, one.kind.read(text)
                except ValueError as exc:
                    mistake = f"{source}: {exc}; allowed: {one.kind.allowed}"
                    if one.older_is_lenient and source == f"variable {one.older_variable}":
                        self.ignored.append(f"ignored: {mistake}")
                        del self.given[one.name]
                    else:
                        self.mistakes.append(mistake)

    def _check_replaced(self) -> None:
        for name, sentence in self.replaced.items():
            if self.flags.get(name) is not None:
                self.mistakes.append(f"flag {flag_of(name)}: {sentence}")
            if self.environ.get(variable := self.prefix + name.upper()):
                self.mistakes.append(f"variable {variable}: {sentence}")

    def _check_names(self) -> None:
        known = {one.variable for one in self.table}
        replaced = {self.prefix + name.upper() for name in self.replaced}
        for name in sorted(self.environ):
            is_ours = name.startswith(self.prefix) and not name.startswith(self.other_prefixes)
            if is_ours and name not in known | replaced:
                self.mistakes.append(f"variable {name}: unknown setting{did_you_mean(name, known)}")

    def check_all_or_none(self, *names: str) -> None:
        present = [name for name in names if name in self.given]
        missing = [flag_of(name) for name in names if name not in self.given]
        if present and missing:
            rule = "both or neither" if len(names) == 2 else "all of them or none"
            self.mistakes.append(f"{self.where(present)}: {' and '.join(missing)} not set; allowed: {rule}")

    def where(self, names: Iterable[str]) -> str:
        return ", ".join(self.given[n].source if n in self.given else f"{flag_of(n)} (default)" for n in names)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def key_of(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def is_service_link(name: str, text: str) -> bool:
    """Whether Kubernetes sets the variable for a Service."""
    if not name.startswith(PREFIX):
        return False
    return bool(SERVICE_LINK.search(name) or (name.endswith("_PORT") and SERVICE_LINK_VALUE.match(text)))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a typing error. The common prefix of all names does not count for the similarity."""
    by_rest = {other.removeprefix(PREFIX).lower(): other for other in known}
    close = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), list(by_rest), n=1, cutoff=0.76)
    return f"; did you mean {by_rest[close[0]]}?" if close else ""


def text_of(value: object, shape: type[object] | None) -> str:
    """A YAML value in the syntax of a flag."""
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return str(value)
        case list() if shape is list and all(isinstance(part, str) for part in value):
            return ",".join(value)
        case dict() if shape is dict:
            return json.dumps(value, default=str)
        case list() if shape is Sequence:
            return json.dumps(value, default=str)
    raise ValueError(f"a YAML {type(value).__name__} is not allowed here")


def plain(value: object) -> object:
    """A setting's value in the types of YAML."""
    match value:
        case Path():
            return str(value)
        case timedelta():
            return f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"
        case tuple():
            return list(value) or None
        case Mapping():
            return dict(value)
        case _:
            return value


def in_words(shown: object) -> str:
    """A plain value in the syntax of a flag."""
    match shown:
        case [dict(), *_]:
            return json.dumps(shown)
        case list():
            return ",".join(map(str, shown))
        case bool():
            return str(shown).lower()
        case _:
            return str(shown)


def row(one: Setting) -> str:
    shown = plain(one.default)
    cells = [
        f"`{one.flag}`" + (f", `-{one.short}`" if one.short else ""),
        f"`{one.variable}`" + (f", else `{one.older_variable}`" if one.older_variable else ""),
        f"`{one.key}`" if one.in_file else "",
        "" if shown in (None, {}) else f"`{in_words(shown)}`",
        one.kind.allowed,
        one.about,
        ", ".join(command for command in Command if command in one.commands),
    ]
    return "| " + " | ".join(cells) + " |\n"
