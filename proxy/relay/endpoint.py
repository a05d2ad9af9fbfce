"""The relayed endpoints as raw ASGI applications: admit, then exchange."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote, unquote_to_bytes

from starlette.types import Receive, Scope, Send

from policies.errors import (
    ApiError,
    AuthenticationFailed,
    InvalidRequest,
    KeysUnavailable,
    RateLimited,
)
from policies.limits import NOTHING, Cost
from policies.settings import BoundsSettings, ModelSettings
from proxy.api.auth import Client, bearer
from proxy.drain import break_off
from proxy.generation import Generation
from proxy.limits.answer import Headers, telling
from proxy.limits.estimate import cost_of
from proxy.limits.limiter import Admission
from proxy.relay import headers as names
from proxy.relay.asgi import ClientLeft, answer_error, read_body, refuse_body, unless_client_leaves
from proxy.relay.attempt import PATHS
from proxy.relay.body import LARGE, Body
from proxy.relay.downlink import PASS_ON
from proxy.relay.exchange import Exchange, shutting_down
from proxy.services import Services, header_map
from proxy.uploads import Upload

_MOST_QUERY = 2048
_PLAIN = "!$%&'()*+,/:;=?@[]"
_LARGE_AT_ONCE = 2
"""Large bodies of one endpoint that are read at the same time."""


class RelayEndpoint:
    """One relayed endpoint: `chat`, `completions`, or the path of one that is relayed unverified. Its services come
    with the scope's application state."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = self.name = endpoint
        self._reading = asyncio.Semaphore(_LARGE_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        services: Services = scope["app"].state.services
        headers = header_map(scope["headers"])
        with services.drain.flight():
            try:
                await self._serve(services, scope, headers, receive, send)
            except asyncio.CancelledError:
                if not services.drain.caught():
                    raise
                break_off(scope)

    async def _serve(
        self, services: Services, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        try:
            client = await _authenticate(services, scope, headers)
        except ApiError as error:
            await answer_error(send, error, [*names.echoed(headers), *_closing(services)], path=self._endpoint)
            return
        with services.uploads.of(client) as upload:
            try:
                admitted = await self._admit(scope, client, headers, upload, receive, send)
            except ClientLeft:
                return
            except ApiError as error:
                await _refuse(services, client, headers, receive, send, error, path=self._endpoint)
                return
            await _exchange(services, admitted, receive)
            if not admitted.exchange.down.delivered:
                break_off(scope)

    async def _admit(
        self,
        scope: Scope,
        client: Client,
        headers: Mapping[bytes, bytes],
        upload: Upload,
        receive: Receive,
        send: Send,
    ) -> _Admitted:
        services: Services = scope["app"].state.services
        mode = _mode(headers, services.settings.verification.mode)
        hint = _hint(headers, client)
        body = await self._read(services.settings.bounds, headers, upload, receive)
        # While the body came other settings may have come, too: it is routed by those that hold now, and goes on so.
        services = scope["app"].state.services
        if not body.model:
            raise InvalidRequest("`model` names no model", param="model")
        route = services.backends.route(body.model, fields=body.fields, owner=client.owner, hint=hint)
        generation = Generation(
            id=secrets.token_hex(16),
            owner=client.owner,
            endpoint=self._endpoint,
            model=body.model,
            mode=mode,
            stream=False,
            operator=client.operator,
            retain=client.retain or services.settings.storage.retain,
            request=body.sha256,
            query="" if self._endpoint in PATHS else _query(scope["query_string"], bearer(headers)),
        )
        pass_on = ((scope.get("extensions") or {}).get(PASS_ON) or {}).get("now")
        if client.limits is None:
            return _Admitted(Exchange(services, generation, body, headers, route, send, pass_on))
        cost = await self._cost(body, services.settings.models[body.model])
        admission = await services.limiter.admit(client, cost)
        exchange = Exchange(services, generation, body, headers, route, telling(send, admission.headers), pass_on)
        admission.used = partial(_taken, exchange, cost)
        return _Admitted(exchange, admission)

    async def _cost(self, body: Body, model: ModelSettings) -> Cost:
        if len(body.data) <= LARGE:
            return cost_of(body, model)
        async with self._reading:
            return await asyncio.to_thread(cost_of, body, model)

    async def _read(
        self, bounds: BoundsSettings, headers: Mapping[bytes, bytes], upload: Upload, receive: Receive
    ) -> Body:
        try:
            data = await read_body(receive, headers, bounds.request_bytes, bounds.body_seconds, upload.weigh)
        except BaseException as error:
            upload.drop()
            if isinstance(error, ApiError):
                error.unread = True
            raise
        upload.whole()
        if len(data) <= LARGE:
            return Body.read(self._endpoint, data, bounds)
        async with self._reading:
            return await asyncio.to_thread(Body.read, self._endpoint, data, bounds)


@dataclass(frozen=True, slots=True)
class _Admitted:
    exchange: Exchange
    admission: Admission | None = None


async def _exchange(services: Services, admitted: _Admitted, receive: Receive) -> None:
    exchange, admission = admitted.exchange, admitted.admission
    settle = services.limiter.settle
    if admission is not None:
        exchange.down.over = lambda: settle(admission, admission.taken())
    try:
        await unless_client_leaves(receive, exchange.run(), lambda: exchange.down.delivered)
    finally:
        if admission is not None:
            settle(admission, admission.taken())


async def _refuse(
    services: Services,
    client: Client,
    headers: Mapping[bytes, bytes],
    receive: Receive,
    send: Send,
    error: ApiError,
    *,
    path: str,
) -> None:
    """Answer with an error; for a client with limits that is one of its requests, too."""
    unread = error.unread
    told: Headers = ()
    if client.limits is not None:
        try:
            if isinstance(error, RateLimited):
                raise error
            admission = await services.limiter.admit(client, NOTHING)
            services.limiter.settle(admission, 0)
            told = admission.headers
        except RateLimited as limited:
            error, told = limited, limited.headers
        send = telling(send, told)
    if unread:
        await refuse_body(receive, send, error, names.echoed(headers), path=path)
    else:
        await answer_error(send, error, [*names.echoed(headers), *_closing(services)], path=path)


def _taken(exchange: Exchange, cost: Cost) -> int:
    """Tokens that the client is charged for: of what it got, and nothing where it got nothing."""
    used = exchange.used()
    return 0 if used is None else cost.taken(*used)


async def _authenticate(services: Services, scope: Scope, headers: Mapping[bytes, bytes]) -> Client:
    """Who is asking. Raises ApiError, where nobody is served any more, too."""
    if services.drain.draining:
        raise shutting_down()
    try:
        return await services.keys.authenticate(headers, scope["client"])
    except (AuthenticationFailed, KeysUnavailable) as error:
        services.metrics.refused.add(1, {"reason": error.error_code or error.type})
        raise


def _closing(services: Services) -> list[tuple[bytes, bytes]]:
    return [(b"connection", b"close")] if services.drain.draining else []


def _mode(headers: Mapping[bytes, bytes], default: str) -> str:
    asked = headers.get(names.MODE)
    if asked is None:
        return default
    mode = asked.strip().lower().decode("latin-1")
    if mode not in {"inline", "async"}:
        raise InvalidRequest("x-countersign-mode is `inline` or `async`")
    return mode


def _query(asked: bytes, key: bytes) -> str:
    if len(asked) > _MOST_QUERY:
        raise InvalidRequest(f"the query of the URL is over {_MOST_QUERY} bytes")
    # A client's key goes to no backend, wherever the client says it, too.
    if not asked or (key and key in unquote_to_bytes(asked)):
        return ""
    return "?" + quote(asked, safe=_PLAIN)


def _hint(headers: Mapping[bytes, bytes], client: Client) -> str | None:
    asked = headers.get(names.BACKEND)
    if asked is None:
        return None
    if not client.admin:
        raise InvalidRequest("x-countersign-backend is for admin keys")
    return asked.strip().decode("latin-1")
