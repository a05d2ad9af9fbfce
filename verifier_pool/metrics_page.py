"""A worker's metrics, shown and sent: `/metrics` on a port of its own, OTLP, or a sheet of its parent's."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from policies.errors import SettingsError
from policies.settings import MetricsSettings, Settings
from verifier_pool.link import exposition
from verifier_pool.link.meters import Family, Meters, merged
from verifier_pool.link.otlp import Sender
from verifier_pool.link.processes import watch_process
from verifier_pool.link.telemetry.resource import resource_of
from verifier_pool.metrics import METERS
from verifier_pool.sheets import SHEETS, Sheet, Writer

_SECONDS = 5.0
"""A reader that is slower than this is cut off."""
_AT_ONCE = 8
"""Readers that are served at a time; more are refused."""


@contextlib.contextmanager
def shown(settings: Settings, name: str, sheet: int | None = None) -> Iterator[None]:
    """While this lasts, show and send what this process and its children count; or, with the file number of a `sheet`,
    write it there for the parent to do so. `name` is what the process does, as its spans say it.

    Raises:
        SettingsError: the port is not free, or no address of this machine.
    """
    process = Meters()
    watch_process(process, "worker", child=sheet is not None)

    def read() -> list[Family]:
        return merged(METERS.read(), process.read(), SHEETS.read())

    with contextlib.ExitStack() as closing:
        if sheet is not None:
            closing.callback(Writer(Sheet(sheet), read).close)
        else:
            if settings.metrics.port is not None:
                closing.callback(Page(settings.metrics, read).close)
            if settings.metrics.otlp:
                closing.callback(Sender(settings.metrics, read, resource_of(settings.telemetry, name)).close)
        yield


class Page:
    """Serves `/metrics` until `close`, to whoever bears the token, where the settings have one.

    Attributes:
        port: where it is.
    """

    def __init__(self, settings: MetricsSettings, read: Callable[[], Sequence[Family]]) -> None:
        places = threading.BoundedSemaphore(_AT_ONCE)

        class Handler(_Handler):
            token = settings.token
            families = staticmethod(read)

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                if not places.acquire(blocking=False):
                    self.shutdown_request(request)
                    return
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    places.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A reader that left is no matter."""

        try:
            self._server = Server((settings.host, settings.port or 0), Handler)
        except OSError as error:
            raise SettingsError(
                "metrics.port", f"a free port of {settings.host!r}, not {settings.port} ({error.strerror})"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    token: Any = None
    families: Callable[[], Sequence[Family]]

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, b"", "text/plain")
        elif self.token is not None and not exposition.bears(self.headers.get("authorization"), self.token):
            self._answer(401, b"", "text/plain")
        else:
            self._answer(200, exposition.page(self.families()), exposition.CONTENT_TYPE)

    def log_message(self, format: str, *args: Any) -> None:
        """Who reads is not logged: requests hold what their sender likes."""

    def version_string(self) -> str:
        return "countersign"

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("www-authenticate", "Bearer")
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
