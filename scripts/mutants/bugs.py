"""The mutations in bugs.toml."""

import tomllib
from pathlib import Path

from attrs import frozen


class PlantError(Exception):
    """The text to replace does not occur exactly once in its file."""


@frozen
class Bug:
    """One wrong change, and the tests that have to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, tree: Path) -> None:
        path = tree / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise PlantError(f"{self.name}: the text occurs {text.count(self.old)} times in {self.file}")
        path.write_text(text.replace(self.old, self.new))


def bugs() -> list[Bug]:
    raw = tomllib.loads((Path(__file__).parent / "bugs.toml").read_text())
    return [Bug(**{**one, "tests": tuple(one["tests"])}) for one in raw["bug"]]
