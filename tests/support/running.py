"""The proxy under a real uvicorn, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from types import TracebackType
from typing import Any

import uvicorn
import uvicorn.server

from policies.settings import Settings
from proxy.app import create_app
from proxy.drain import Drain
from proxy.serve import config_of
from proxy.services import Services
from tests.support import routes
from tests.support.waiting import PATIENCE
from verifier_pool.link.settings_file import SettingsFile


class _Hasty:
    """asyncio as uvicorn's server knows it. It looks ten times a second whether it is to end, and then waits for a
    tenth of a second: together more than most tests take."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


setattr(uvicorn.server, "asyncio", _Hasty())  # noqa: B010 - a module in its place, for type checkers
routes.install()


class RunningProxy:
    """A context manager; `settings` without host and port, a free port is taken. It follows its `file`, if any."""

    def __init__(self, settings: Settings, redis_url: str, file: SettingsFile | None = None) -> None:
        self.drain = Drain()
        self.app = create_app(settings, redis_url, self.drain, file=file)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(config_of(self.app, settings))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """The admin API's."""
        host, port = self.app.state.admin
        return f"http://{host}:{port}"

    @property
    def services(self) -> Services:
        """Its parts."""
        services: Services = self.app.state.services
        return services

    def __enter__(self) -> RunningProxy:
        self._thread.start()
        deadline = time.monotonic() + PATIENCE
        while not self._server.started:
            assert time.monotonic() < deadline
            assert self._thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def settings_for(*urls: str, **sections: Any) -> Settings:
    """Settings with one model `m` (called `served` by its backends) and a backend `b1`, `b2`, … per URL; no probes."""
    backends = [
        {"name": f"b{n}", "url": url, "model": "m", "served_model": "served", "runtime": "vllm-0.32-v2"}
        for n, url in enumerate(urls, 1)
    ]
    base = {"models": {"m": {"vocab_size": 1000}}, "backends": backends, "health": {"interval": 0}}
    return Settings.model_validate(base | sections)
