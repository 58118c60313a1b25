"""`python -m scripts.promtool`: builds promtool and prints its path."""

import sys

from scripts.controlplane.__main__ import TOOL_MISSING
from scripts.controlplane.build import BuildError, ToolMissingError
from scripts.promtool import build


def main() -> int:
    try:
        print(build())
    except BuildError as exc:
        print(exc, file=sys.stderr)
        return TOOL_MISSING if isinstance(exc, ToolMissingError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
