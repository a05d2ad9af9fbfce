"""What a client remembers of an operator's log from one process to the next."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from policies import jws, pins
from policies.errors import ReceiptError
from policies.head import Head

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]


class Pins:
    """The last head of the log that was seen, the keys it was signed with, and the leaves of receipts that were, in a
    file that only its owner can read. Several processes may have one file.

    Raises:
        ReceiptError: the file is damaged. To delete it is to trust whatever log is shown next.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.head: Head | None = None
        self.keys: dict[str, bytes] = {}
        self.leaves: dict[str, str] = {}
        self.read()

    def read(self) -> None:
        """See what is in the file now, where it is there. Raises ReceiptError."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return
        try:
            found = pins.read(text)
        except ReceiptError as error:
            raise ReceiptError(f"{self._path} holds no pins") from error
        self.head, self.keys, self.leaves = found.head, dict(found.keys), dict(found.leaves)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While this lasts no other process changes the file, where the system can see to that. Raises OSError."""
        if fcntl is None:
            yield
            return
        with open(self._path.with_name(f"{self._path.name}.lock"), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

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
