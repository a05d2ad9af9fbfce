"""`countersign serve`: the proxy, and an embedded Valkey where no Redis is given."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from types import FrameType

import uvicorn
from redis.exceptions import RedisError
from starlette.types import ASGIApp

from policies.errors import SettingsError
from policies.settings import Settings, embedded_dir, parse_settings, store_url
from policies.undeclared import undeclared
from proxy.api.auth import is_loopback
from proxy.app import create_app
from proxy.drain import Drain
from proxy.embedded import EmbeddedValkey
from proxy.listening import listen, uvicorn_config
from verifier_pool.link import connection
from verifier_pool.link.keys import KEYS
from verifier_pool.link.settings_file import SettingsFile, hold_hangups, settings_path
from verifier_pool.link.signing import signer_of
from verifier_pool.link.telemetry import log

logger = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
_SHUTDOWN_SECONDS = 5
"""Seconds for what ends by itself when it is cancelled or its connection is cut, and for some reason does not."""
_MOMENT = 0.5
_GARBAGE = (1000, 10, 100)
"""When garbage is looked for (`gc.set_threshold`). What a request leaves is freed without that, but for a few
objects of aiohttp's where a backend breaks its connection off; and a look at everything stops every stream: for 0.1 s
where there are 1,000 of them, with Python's own numbers three times in a thousand requests."""
_ANSWER_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    """Run the proxy until a signal ends it; returns the exit code.

    Raises SettingsError (exit code 3) and CountersignError (exit code 1).
    """
    hold_hangups()
    arguments = _parser().parse_args(argv)
    file = SettingsFile(settings_path(arguments.config, os.environ))
    settings = parse_settings(file.take().text, os.environ)
    if arguments.port is not None and not 0 <= arguments.port < 65536:
        raise SettingsError("port", f"a number from 0 to 65535, not {arguments.port}")
    if arguments.drain is not None and not arguments.drain >= 0:
        raise SettingsError("--drain", f"a number of seconds, not {arguments.drain}")
    given = {key: value for key in ("host", "port") if (value := getattr(arguments, key)) is not None}
    settings = settings.model_copy(update=given)
    log.configure(settings.telemetry.log_level, texts=settings.telemetry.log_texts)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(settings.host, settings.port, "host"))
        url = store_url(settings, os.environ)
        if settings.redis_url is None:
            if settings.durability.replicas:
                raise SettingsError("durability.replicas", "0 without a redis_url: the embedded Valkey has none")
            folder = embedded_dir(settings, os.environ)
            stack.enter_context(EmbeddedValkey(folder, always=settings.durability.aof))
        if not is_loopback(listening.getsockname()[0]):
            _check_keys(settings, url)
        _check_signing(settings, url)
        drain = Drain()
        app = create_app(settings, url, drain, file=file, given=given)
        _serve(app, settings, drain, listening, arguments.drain)
    return 0


class _Server(uvicorn.Server):
    """Uvicorn, except that a signal first drains: readiness turns false, what runs is finished and taken by its client,
    new requests are refused with 503, and only then the sockets close. What still runs after `most` seconds of that is
    broken off and recorded as it is. After a second signal no time is left, and a third one ends at once."""

    def __init__(self, config: uvicorn.Config, drain: Drain, most: float | None) -> None:
        super().__init__(config)
        self._drain = drain
        self._most = math.inf if most is None else most
        self._over = math.inf
        self._told = False
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._signals += 1
        self._drain.draining = True
        if self._signals > 2:
            self.should_exit = self.force_exit = True
        else:
            self._over = time.monotonic() + (self._most if self._signals == 1 else 0.0)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; true ends the main loop."""
        drain = self._drain
        if drain.draining and not self.should_exit:
            late = time.monotonic() - self._over
            if late > 0:
                if (left := drain.end()) and not self._told:
                    logger.warning("answers are broken off: the time to drain is over", extra={"answers": left})
                    self._told = True
                self.should_exit = not left or late > _SHUTDOWN_SECONDS
            else:
                self.should_exit = not drain.in_flight and not self._sending
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything. Whatever is not through by then has a moment more; uvicorn would wait, and complain."""
        moment = _MOMENT if self._drain.over else _SHUTDOWN_SECONDS - _MOMENT
        cutting = asyncio.get_running_loop().call_later(moment, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    @property
    def _sending(self) -> bool:
        """Whether a client has not taken all of its answer yet; how long it may take is the connection's matter."""
        return any(each.transport.get_write_buffer_size() for each in self.server_state.connections)

    def _cut(self) -> None:
        for each in list(self.server_state.connections):
            each.transport.abort()


def config_of(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """How uvicorn serves clients."""
    return uvicorn_config(app, settings, lifespan=True, keep_alive=_KEEP_ALIVE_SECONDS, shutdown=_SHUTDOWN_SECONDS)


def _serve(app: ASGIApp, settings: Settings, drain: Drain, listening: socket.socket, most: float | None) -> None:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    logger.info("listening", extra={"url": f"http://{shown}:{port}", "backends": len(settings.backends)})
    for missing in undeclared(settings):
        logger.warning("not declared, so not checked", extra={"setting": missing.setting, "unseen": missing.unseen})
    # What is here now stays, and no collection of garbage, which stops every stream, needs to look at it again.
    gc.freeze()
    gc.set_threshold(*_GARBAGE)
    _Server(config_of(app, settings), drain, most).run(sockets=[listening])


def _check_keys(settings: Settings, redis_url: str) -> None:
    """Whether there is a client key, in the settings or in Redis, without which no other machine may ask.

    Raises SettingsError.
    """
    if settings.keys:
        return
    why = f"because {settings.host!r} is open to other machines (`countersign keys create` makes one)"
    with contextlib.closing(connection.connect(redis_url, timeout=_ANSWER_SECONDS)) as redis:
        try:
            if redis.hlen(KEYS):
                return
        except (RedisError, OSError) as error:
            expected = f"at least one client key, {why}; whether Redis has one it does not say"
            raise SettingsError("keys", f"{expected} ({type(error).__name__})") from error
    raise SettingsError("keys", f"at least one client key, {why}")


def _check_signing(settings: Settings, redis_url: str) -> None:
    """Whether receipts can be signed, as far as Redis says now. Raises SettingsError."""
    with (
        contextlib.closing(connection.connect(redis_url, timeout=1.0, connect_timeout=1.0, retries=0)) as redis,
        contextlib.suppress(RedisError, OSError),
    ):
        signer_of(redis, settings).check()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign serve", description="Run the proxy.")
    parser.add_argument("--config", metavar="PATH", help="settings (default: $COUNTERSIGN_CONFIG, ./countersign.yaml)")
    parser.add_argument("--host", help="address to listen on, instead of the settings' one")
    parser.add_argument("--port", type=int, help="port to listen on, instead of the settings' one")
    drain = "the most that running answers may take after a signal; what is left is broken off (default: no limit)"
    parser.add_argument("--drain", metavar="SECONDS", type=float, help=drain)
    return parser
