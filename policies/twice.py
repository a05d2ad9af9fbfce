"""Objects of JSON with a key that stands in them twice. One reader takes the first value, another the last, so that
they say two things at once; no engine writes them."""

from __future__ import annotations

import json
from typing import Any


class Twice(dict[str, Any]):
    """An object with a key that stands in it twice; it has the last value, as with most readers."""


def loads(data: bytes | str) -> Any:
    """As `json.loads`, which see, with such objects as `Twice`."""
    return json.loads(data, object_pairs_hook=_object)


def is_twice(value: Any) -> bool:
    """Whether a value that `loads` gave is such an object, or holds one."""
    if isinstance(value, dict):
        return isinstance(value, Twice) or any(map(is_twice, value.values()))
    return isinstance(value, list) and any(map(is_twice, value))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else Twice(found)
