"""The relayed endpoints as raw ASGI applications: admit, then exchange."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from policies.errors import ApiError, BackendUnavailable, InvalidRequest, RequestTooLarge
from proxy.api.auth import Client
from proxy.generation import Generation
from proxy.relay import headers as names
from proxy.relay.asgi import ClientLeft, answer_error, read_body, refuse_body, unless_client_leaves
from proxy.relay.exchange import Exchange
from proxy.services import Services, header_map


class _Named(msgspec.Struct):
    model: Any = None


_named = msgspec.json.Decoder(_Named)


class RelayEndpoint:
    """One relayed endpoint: `chat`, `completions`, or the path of one that is relayed unverified. Its services come
    with the scope's application state."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        services: Services = scope["app"].state.services
        headers = header_map(scope["headers"])
        services.drain.in_flight += 1
        services.metrics.in_flight.add(1)
        try:
            try:
                exchange = await self._admit(services, scope, headers, receive, send)
            except ClientLeft:
                return
            except RequestTooLarge as error:
                await refuse_body(receive, send, error, names.echoed(headers))
                return
            except ApiError as error:
                await answer_error(send, error, [*names.echoed(headers), *_closing(services)])
                return
            await unless_client_leaves(receive, exchange.run(), lambda: exchange.down.delivered)
        finally:
            services.metrics.in_flight.add(-1)
            services.drain.in_flight -= 1

    async def _admit(
        self, services: Services, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> Exchange:
        if services.drain.draining:
            raise BackendUnavailable("this proxy is shutting down; try again", code="draining")
        client = services.keys.client(_with_bearer(headers), scope["client"])
        mode = _mode(headers, services.settings.verification.mode)
        hint = _hint(headers, client)
        body = await read_body(receive, headers, services.settings.max_body_bytes)
        try:
            model = _named.decode(body).model
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest("the request body is not a JSON object") from error
        if not isinstance(model, str):
            raise InvalidRequest("`model` names no model", param="model")
        candidates = services.backends.candidates(model, hint)
        generation = Generation(
            id=secrets.token_hex(16),
            owner=client.owner,
            endpoint=self._endpoint,
            model=model,
            mode=mode,
            stream=False,
            operator=client.operator,
        )
        return Exchange(services, generation, body, headers, candidates, send, hinted=hint is not None)


def _with_bearer(headers: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """The headers, with a key as clients of the Messages API send it where they look for OpenAI's."""
    key = headers.get(names.API_KEY)
    return headers if key is None or b"authorization" in headers else {**headers, b"authorization": b"Bearer " + key}


def _mode(headers: Mapping[bytes, bytes], default: str) -> str:
    asked = headers.get(names.MODE)
    if asked is None:
        return default
    mode = asked.strip().lower().decode("latin-1")
    if mode not in {"inline", "async"}:
        raise InvalidRequest("x-countersign-mode is `inline` or `async`")
    return mode


def _hint(headers: Mapping[bytes, bytes], client: Client) -> str | None:
    asked = headers.get(names.BACKEND)
    if asked is None:
        return None
    if not client.admin:
        raise InvalidRequest("x-countersign-backend is for admin keys")
    return asked.strip().decode("latin-1")


def _closing(services: Services) -> list[tuple[bytes, bytes]]:
    return [(b"connection", b"close")] if services.drain.draining else []
