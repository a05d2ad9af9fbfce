"""What every tap shares."""

from __future__ import annotations

from typing import Any

from policies.errors import ApiError, UpstreamFailed, UpstreamTimeout
from policies.evidence import Evidence
from proxy.tap.allowed import Allowed
from proxy.tap.collect import Collector
from proxy.tap.guarded import UNREADABLE_FAULT, Guarded
from proxy.tap.rawjson import Object, raw, read_object, read_objects, write
from proxy.tap.repeats import is_ambiguous
from proxy.tap.tokens import TokenStrings
from proxy.tap.types import Prepared
from proxy.tap.view import View

DONE = b"data: [DONE]\n\n"
INVALID_JSON = "invalid_json"
"""Fault of what is no JSON, or not that of an answer."""
AFTER_END = "after_end"
"""Fault of a backend that goes on after the end of its answer."""
PROXY_OVERLOADED = "proxy_overloaded"
"""Fault of an answer that was given up because the proxy holds too much."""
LARGE = 256 * 1024
"""Bytes of a body from which it is not read on the event loop."""


class BaseTap(Guarded):
    """Collects evidence and rewrites objects for the client; how bytes become objects is the subclass's."""

    def __init__(self, prepared: Prepared, model_name: str, strings: TokenStrings | None, allowed: Allowed) -> None:
        self.allowed = allowed
        self.collector = Collector(prepared, allowed)
        self.view = View(prepared, model_name, strings)
        self.prepared = prepared

    @property
    def large(self) -> bool:
        """See Tap."""
        return False

    def _settle(self) -> None:
        """See Tap."""
        self.collector.settle()

    def used(self) -> tuple[int | None, int | None]:
        """See Tap."""
        try:
            return self.collector.used()
        except Exception:
            self._broke()
            return None, None

    def evidence(self, **meta: Any) -> list[Evidence]:
        """One Evidence per choice, for whatever arrived; `meta` overrides fields."""
        return self.collector.evidence(**meta)

    def whole(self, top: Object) -> tuple[Object, bool] | None:
        """A whole response for the client, and whether it changed; None when its choices are unreadable."""
        choices = read_objects(top["choices"]) if "choices" in top else None
        if choices is None:
            return None
        self.collector.response(top)
        usage = read_object(top["usage"]) if "usage" in top else None
        reasons = usage is not None and read_object(usage.get("completion_tokens_details", b"")) is not None
        changed = False
        self.collector.apart(choices)
        for choice in choices:
            self.collector.choice(choice, whole=True)
            changed |= self.view.message(choice, reasons=reasons)
        if changed or is_ambiguous(top["choices"], choices):
            top["choices"], changed = raw(choices), True
        changed |= self.view.response(top)
        self.collector.terminal = True
        return top, changed

    def _broke(self) -> None:
        self.collector.unreadable()


def error_frame(fault: str | None) -> bytes:
    """An OpenAI-shaped error as the last frame of a stream."""
    return b"data: " + error_body(fault) + b"\n\n"


def error_body(fault: str | None) -> bytes:
    """An OpenAI-shaped error: what went wrong with the backend."""
    return write(error_of(fault).body())


def error_of(fault: str | None) -> ApiError:
    """What went wrong with the backend, as an error for its client."""
    if fault == "upstream_timeout":
        return UpstreamTimeout("The backend stopped answering.", code=fault)
    if fault in ("line_too_long", "too_large"):
        return UpstreamFailed("The backend's answer is too large.", code=fault)
    if fault == "too_deep":
        return UpstreamFailed("The backend's answer nests JSON too deeply.", code=fault)
    if fault == PROXY_OVERLOADED:
        return ApiError("The proxy holds too much of unfinished answers.", code="overloaded")
    if fault in (UNREADABLE_FAULT, INVALID_JSON):
        return UpstreamFailed("The backend's answer cannot be read.", code=fault)
    return UpstreamFailed("The backend's answer ended early.", code=fault)
