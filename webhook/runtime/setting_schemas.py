"""JSON schemas of setting values. The chart's schema consists of them, so that `helm install` refuses a bad value.

A schema refuses no value that the setting's reader accepts. The reader judges what the schema lets pass.
"""

from datetime import timedelta
from typing import Any, Final

Schema = dict[str, Any]

BOOLEAN: Final[Schema] = {"type": "boolean"}
# YAML turns a text of digits into a number.
ANY_TEXT: Final[Schema] = {"type": ["string", "number"]}
FRACTION: Final = r"(\.[0-9]{1,9})?"
# More digits than this are not a duration.
MAX_DIGITS: Final = 9


def one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def text(pattern: str) -> Schema:
    """Helm uses Go's regular expressions, which have no lookahead and no lookbehind."""
    return {"type": "string", "pattern": f"^{pattern}$"}


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def comma_list(item: str) -> Schema:
    """A list of texts, or one text with commas."""
    pattern = rf"^\s*{item}\s*(,\s*{item}\s*)*$"
    return {
        "type": ["array", "string"],
        "minItems": 1,
        "items": {"type": "string", "pattern": pattern},
        "pattern": pattern,
    }


def duration(longest: timedelta, *, may_be_zero: bool) -> Schema:
    """A number with a unit, or a number of seconds. Each unit has as many digits as the longest duration needs."""
    seconds = longest.total_seconds()
    units = (("ms", seconds * 1000), ("s?", seconds), ("m", seconds / 60), ("h", seconds / 3600))
    parts = [f"[0-9]{{1,{min(len(str(int(most))), MAX_DIGITS)}}}{FRACTION}{unit}" for unit, most in units]
    least: Schema = {"minimum": 0} if may_be_zero else {"minimum": 0, "exclusiveMinimum": 0}
    return {"type": ["string", "number"], "pattern": f"^({'|'.join(parts)})$", **least, "maximum": int(seconds)}


def json_object(values: Schema) -> Schema:
    """An object, or JSON of one."""
    return {"type": ["object", "string"], "pattern": r"^\s*\{", "additionalProperties": values}


def json_list(items: Schema) -> Schema:
    """A list, or JSON of one."""
    return {"type": ["array", "string"], "pattern": r"^\s*\[", "items": items}
