"""The span of a request, around everything else that is done for it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from policies import traceparent
from policies.traceparent import TraceContext
from proxy.conventions import operation_of
from proxy.services import Services
from verifier_pool.link.telemetry import names
from verifier_pool.link.telemetry.tracing import entered


class TracedEndpoint:
    """An endpoint whose requests are traced, as many as the settings say. It has ended by whatever way they do: a span
    is over as soon as its request is."""

    def __init__(self, app: ASGIApp, endpoint: str, path: str) -> None:
        self._app = app
        self._operation = operation_of(endpoint)
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        services: Services = scope["app"].state.services
        tracing = services.tracing
        if tracing is None or not tracing.drawn():
            await self._app(scope, receive, send)
            return
        status, whole = 0, False

        async def noting(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                whole = True
            await send(message)

        with entered(tracing.root(self._operation, client=_of_client(scope))) as span:
            span.set({names.METHOD: "POST", names.PATH: self._path, names.OPERATION: self._operation})
            try:
                await self._app(scope, receive, noting)
            finally:
                span.set({names.STATUS: status or None})
                if not whole:
                    span.failed("incomplete" if status else "no_answer")
                elif status >= 500:
                    span.failed(str(status))


def _of_client(scope: Scope) -> TraceContext | None:
    """What the request's `traceparent` says; several say nothing."""
    given = [value for name, value in scope["headers"] if name == b"traceparent"]
    return traceparent.decode(given[0].decode("latin-1")) if len(given) == 1 else None
