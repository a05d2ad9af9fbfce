"""What a client remembers of an operator's log from one process to the next."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from policies import jws, pins
from policies.errors import ReceiptError
from policies.head import Head


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
            text = path.read_bytes()
        except FileNotFoundError:
            return
        try:
            found = pins.read(text)
        except ReceiptError as error:
            raise ReceiptError(f"{path} holds no pins") from error
        self.head, self.keys, self.leaves = found.head, dict(found.keys), dict(found.leaves)

    def pin(self, head: Head | None, keys: jws.Keys, leaves: Mapping[str, str]) -> None:
        """Remember these from here on. Raises OSError."""
        self.head, self.keys, self.leaves = head, dict(keys), dict(leaves)
        said = pins.written(pins.Pinned(head, self.keys, self.leaves))
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(said)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
