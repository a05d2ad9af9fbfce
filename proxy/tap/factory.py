"""Chooses the tap for a response, once its status and content type are known."""

from __future__ import annotations

from proxy.tap.restream import RestreamTap
from proxy.tap.stream import StreamTap, UndeclaredTap
from proxy.tap.tokens import TokenStrings
from proxy.tap.types import Prepared, Tap
from proxy.tap.whole import PassTap, WholeTap

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_BODY_BYTES = 256 * 1024 * 1024


def open_tap(
    prepared: Prepared,
    model_name: str,
    *,
    tokenizer: TokenStrings | None = None,
    status: int = 200,
    content_type: str | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Tap:
    """The tap for one response.

    Args:
        prepared: the request, as `prepare` returned it.
        model_name: the model's public name; replaces the backend's name for it in the answer.
        tokenizer: the model's token strings, for clients that ask for logprobs.
        status: the backend's HTTP status.
        content_type: the backend's `Content-Type`; None counts as what was asked for.
        max_line_bytes: longest line, and longest event, of a stream.
        max_body_bytes: longest body that is not streamed.
    """
    kind = (content_type or "").split(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if not 200 <= status < 300:
        return PassTap(prepared, json=is_json or not kind, max_bytes=max_line_bytes)
    if prepared.upstream_stream and not is_json:
        kinds = StreamTap if kind in ("", "text/event-stream") else UndeclaredTap
        return kinds(prepared, model_name, tokenizer, max_line_bytes)
    if prepared.asked.stream and not prepared.upstream_stream:
        return RestreamTap(prepared, model_name, tokenizer, max_body_bytes)
    return WholeTap(prepared, model_name, tokenizer, max_body_bytes)
