"""How limits are told to clients: `x-ratelimit-*` and `retry-after`, as OpenAI's clients read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.types import Message, Send

from policies.errors import QuotaExceeded, RateLimited
from policies.limits import duration
from policies.settings import LimitSettings
from proxy.limits.counted import Counted

Headers = Sequence[tuple[bytes, bytes]]
_OURS = b"x-ratelimit-"
_PERIODS = {"day": "today's", "month": "this month's", "never": "the"}


def headers_of(limits: LimitSettings, counted: Counted) -> list[tuple[bytes, bytes]]:
    """What is left, and when nothing of it will be used any more. Tokens are those of a minute where these are limited,
    else those of the budget."""
    found: list[tuple[bytes, bytes]] = []
    if limits.requests_per_minute:
        found += _three(b"requests", limits.requests_per_minute, counted.requests_left, counted.requests_reset)
    if limits.tokens_per_minute:
        found += _three(b"tokens", limits.tokens_per_minute, counted.tokens_left, counted.tokens_reset)
    elif limits.tokens:
        found += _three(b"tokens", limits.tokens, counted.budget_left, counted.budget_reset)
    return found


def refusal(limits: LimitSettings, counted: Counted) -> RateLimited:
    """Why a request was not let in."""
    after = None if counted.wait < 0 else max(counted.wait, 1) / 1000
    when = "" if after is None else f"; try again in {duration(max(counted.wait, 1))}"
    match counted.refused:
        case "quota":
            period = _PERIODS[limits.every]
            text = (
                f"{period} budget of this key, {limits.tokens} tokens, does not cover the request: it may take up to "
                f"{counted.budget_cost} and {counted.budget_left} are left"
            )
            return QuotaExceeded(text + when, retry_after=after)
        case "held":
            text = "what is left of this key's budget is held for its requests under way"
            return RateLimited(text + when, retry_after=after, kind="tokens")
        case "size":
            text = (
                f"the request may take {counted.tokens_cost} tokens, and this key has {limits.tokens_per_minute} a "
                "minute: shorten it, or set a smaller max_tokens"
            )
            return RateLimited(text, retry_after=None, kind="tokens")
        case "tokens":
            text = f"this key has {limits.tokens_per_minute} tokens a minute; the request may take more than are left"
            return RateLimited(text + when, retry_after=after, kind="tokens")
        case "concurrency":
            text = f"this key may have {limits.concurrency} requests under way at once"
            return RateLimited(text + when, retry_after=after)
        case _:
            text = f"this key has {limits.requests_per_minute} requests a minute"
            return RateLimited(text + when, retry_after=after)


def again(error: RateLimited) -> list[tuple[bytes, bytes]]:
    """When to come again; clients are told not to try where that is not soon."""
    found = []
    if error.retry_after is not None:
        found.append((b"retry-after", str(math.ceil(error.retry_after)).encode()))
        found.append((b"retry-after-ms", str(math.ceil(error.retry_after * 1000)).encode()))
    if error.retry_after is None or isinstance(error, QuotaExceeded):
        found.append((b"x-should-retry", b"false"))
    return found


def telling(send: Send, headers: Headers) -> Send:
    """`send`, with these limits in the head of every answer and a backend's own in none."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [item for item in message["headers"] if not item[0].lower().startswith(_OURS)]
            message = {**message, "headers": [*kept, *headers]}
        await send(message)

    return tell


def _three(what: bytes, limit: int, left: int, reset: int) -> list[tuple[bytes, bytes]]:
    found = [(_OURS + b"limit-" + what, str(limit).encode()), (_OURS + b"remaining-" + what, str(left).encode())]
    return found if reset < 0 else [*found, (_OURS + b"reset-" + what, duration(reset).encode())]
