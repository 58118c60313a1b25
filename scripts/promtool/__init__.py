"""promtool, built like the control plane, only on request."""

from pathlib import Path

from scripts.controlplane.build import binaries, cache_directory, digest_of, is_complete, read_pins

HERE = Path(__file__).resolve().parent


def built() -> Path | None:
    """The binary, or None if it was not built."""
    pins = read_pins(HERE)
    directory = cache_directory() / HERE.name / digest_of(pins) / "bin"
    return directory / "promtool" if is_complete(directory, pins) else None


def build() -> Path:
    """The binary, built if missing. Raises BuildError."""
    return binaries(HERE) / "promtool"
