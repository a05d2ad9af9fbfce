"""The settings file, looked at for changes: also where it is a link that is swapped, as Kubernetes does with its maps.

A change counts once two looks in a row have found the same file: one that is being written is not read in the middle.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from policies.errors import SettingsError

Stamp = tuple[int, ...]


def hold_hangups() -> set[int]:
    """Let SIGHUP wait until it is heard: it would end a process that still starts. What is started meanwhile starts so,
    too. Returns which signals waited before."""
    return {int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})}


def hear_hangups() -> None:
    """There is a handler for SIGHUP from here on."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def settings_path(given: str | None, environ: Mapping[str, str]) -> Path:
    """The settings file: the one given, `$COUNTERSIGN_CONFIG` or `./countersign.yaml`."""
    return Path(given or environ.get("COUNTERSIGN_CONFIG") or "countersign.yaml")


@dataclass(frozen=True, slots=True)
class Found:
    """What a file said. `sha256` (hex) is of it and of the other files that were looked at."""

    text: str
    sha256: str


class SettingsFile:
    """One settings file, and others whose contents matter as much. Not for several threads at once.

    Args:
        others: paths of those, asked for at each look.
    """

    def __init__(self, path: Path, others: Callable[[], Iterable[Path]] = tuple) -> None:
        self.path = path
        self._others = others
        self._stamps: tuple[Stamp, ...] | None = None
        self._seen: tuple[Stamp, ...] | None = None
        self.sha256 = ""

    def take(self) -> Found:
        """Read it now; from here on only changes count. Raises SettingsError where it cannot be read."""
        self._seen = self._stamps = self._stamped()
        found = self._read()
        self.sha256 = found.sha256
        return found

    def look(self) -> Found | None:
        """What it says, if that is something else than when it was last taken. Raises SettingsError."""
        stamps = self._stamped()
        if stamps == self._stamps:
            return None
        if stamps != self._seen:
            self._seen = stamps
            return None
        self._stamps, before = stamps, self.sha256
        found = self._read()
        self.sha256 = found.sha256
        return None if found.sha256 == before else found

    def _read(self) -> Found:
        self.sha256 = ""  # what cannot be read now is news once it can be, whatever it says
        try:
            data = self.path.read_bytes()
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SettingsError("--config", f"a settings file in UTF-8, not {str(self.path)!r}") from error
        except OSError as error:
            raise SettingsError(
                "--config", f"a readable settings file, not {str(self.path)!r} ({error.strerror})"
            ) from error
        digest = hashlib.sha256(data)
        for path in self._others():
            try:
                digest.update(b"\0" + hashlib.sha256(path.read_bytes()).digest())
            except OSError:
                digest.update(b"\0")
        return Found(text, digest.hexdigest())

    def _stamped(self) -> tuple[Stamp, ...]:
        return tuple(map(_stamp, (self.path, *self._others())))


def _stamp(path: Path) -> Stamp:
    """What changes with a file: the file itself behind all links, its size and when it was written."""
    try:
        found = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
