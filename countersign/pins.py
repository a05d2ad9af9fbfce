"""What a client remembers of an operator's log from one process to the next."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from policies import jws
from policies.errors import ReceiptError
from policies.head import Head, verify_head

_ID, _LEAF = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")


class Pins:
    """The last head of the log that was seen, the keys it was signed with, and the leaves of receipts that were, in a
    file that only its owner can read.

    Raises:
        ReceiptError: the file is damaged. To delete it is to trust whatever log is shown next.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.head: Head | None = None
        self.keys: dict[str, bytes] = {}
        self.leaves: dict[str, str] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        try:
            found = json.loads(text)
            self.keys = jws.keys_in(found["keys"])
            self.head = None if found["head"] is None else verify_head(found["head"], self.keys)
            self.leaves = _leaves_in(found.get("leaves", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ReceiptError(f"{path} holds no pins") from error

    def pin(self, head: Head | None, keys: jws.Keys, leaves: Mapping[str, str]) -> None:
        """Remember these from here on. Raises OSError."""
        self.head, self.keys, self.leaves = head, dict(keys), dict(leaves)
        said = {
            "head": None if head is None else head.token,
            "keys": jws.jwk_set(keys.values()),
            "leaves": self.leaves,
        }
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(said, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise


def _leaves_in(found: Mapping[str, str]) -> dict[str, str]:
    if not all(_ID.fullmatch(id) and _LEAF.fullmatch(leaf) for id, leaf in found.items()):
        raise ValueError("no leaves")
    return dict(found)
