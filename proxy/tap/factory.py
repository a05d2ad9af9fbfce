"""Chooses the tap for a response, once its status and content type are known."""

from __future__ import annotations

from policies.settings import BoundsSettings
from proxy.tap.allowed import allowed
from proxy.tap.foreign import ForeignJsonTap, ForeignStreamTap, ForeignTap
from proxy.tap.foreign_other import ForeignOtherTap
from proxy.tap.passed import Passed
from proxy.tap.restream import RestreamTap
from proxy.tap.stream import StreamTap
from proxy.tap.tokens import TokenStrings
from proxy.tap.types import Prepared, Tap
from proxy.tap.undeclared import UndeclaredTap, UnstreamedTap
from proxy.tap.whole import PassTap, WholeTap

_DEFAULT = BoundsSettings()


def open_tap(
    prepared: Prepared,
    model_name: str,
    *,
    tokenizer: TokenStrings | None = None,
    status: int = 200,
    content_type: str | None = None,
    bounds: BoundsSettings = _DEFAULT,
) -> Tap:
    """The tap for one response.

    Args:
        prepared: the request, as `prepare` returned it.
        model_name: the model's public name; replaces the backend's name for it in the answer.
        tokenizer: the model's token strings, for clients that ask for logprobs.
        status: the backend's HTTP status.
        content_type: the backend's `Content-Type`; None counts as what was asked for.
        bounds: how much is taken of a backend.
    """
    most = allowed(prepared, bounds)
    kind = (content_type or "").split(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if not 200 <= status < 300:
        return PassTap(prepared, most)
    if prepared.upstream_stream:
        kinds = StreamTap if kind in ("", "text/event-stream") else UnstreamedTap if is_json else UndeclaredTap
        return kinds(prepared, model_name, tokenizer, most)
    if prepared.asked.stream and not prepared.upstream_stream:
        return RestreamTap(prepared, model_name, tokenizer, most)
    return WholeTap(prepared, model_name, tokenizer, most)


def open_foreign_tap(passed: Passed, *, content_type: str | None, bounds: BoundsSettings = _DEFAULT) -> ForeignTap:
    """The tap for one answer."""
    kind = (content_type or "").split(";")[0].strip().lower()
    if kind == "text/event-stream":
        return ForeignStreamTap(passed, bounds)
    if kind in ("", "application/json") or kind.endswith("+json"):
        return ForeignJsonTap(passed, bounds)
    return ForeignOtherTap(passed, bounds)
