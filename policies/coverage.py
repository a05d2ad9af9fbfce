"""Coverage: which part of what a backend served could be decided, and who kept the rest from it.

A response is *decided* when structure and selection each pass or reject and, where it was audited, distance judged it
(a borderline score is a judgement). Where the request keeps one of selection and distance from applying, the other
suffices. Coverage is decided ÷ served, in tokens.

What stays undecided is put down to one of three: the request (its parameters, its client leaving), us (the reference,
the store, a profile or declaration that is missing), or the backend. The last is not proof of anything: it is what a
backend could do to stay unjudged, so it is counted by reason and keeps it from being trusted. A code that is not
listed here is the backend's: silence must not be a way out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REQUEST = "request"
OURS = "ours"
BACKEND = "backend"

_BY_REQUEST = frozenset(
    {
        *("client_left", "client_error", "endpoint", "not_replayed", "grammar", "media"),
        *("too_short", "no_tokens", "no_seed", "bad_temperature", "undecided"),
    }
)
_BY_US = frozenset(
    {
        *("backlog", "store_unavailable", "proxy_lost", "proxy_stopped", "proxy_overloaded", "internal_error"),
        *("evidence_expired", "evidence_unreadable", "evidence_too_large", "job_failed", "job_unreadable"),
        *("no_profile", "profile_mismatch", "outside_profile", "ids_form", "stream", "no_reference_experts"),
        *("no_tokenizer", "no_max_model_len", "finish_undecided", "unknown_runtime", "speculative"),
        *("too_long", "refused", "bad_ids", "bad_request", "nothing_to_replay", "bad_replay"),
        *("unreachable", "timeout", "overloaded", "engine_failed", "not_finite", "wrong_model", "not_replayed_yet"),
        *("reference_backlog", "replay_failed", "self_test", "reference_unsound", "canary_overdue"),
    }
)
_DECIDED = ("pass", "reject")
_CODE = re.compile(r"[a-z0-9_]+")
_OTHER = "other"


def of(verification: Mapping[str, Any]) -> tuple[str, str]:
    """Code of what kept a response from being decided, and who did; both empty where it was decided."""
    word = verification["verdict"]
    if word == "reject":
        return "", ""
    if word in ("withheld", "unverified"):
        code = code_of(next(iter(verification["reasons"]), ""))
        return code, BACKEND if word == "withheld" else blame_of(code)
    checks = {check["name"]: check for check in verification["checks"]}
    open_codes = [_open(checks.get("structure")), _open(checks.get("selection"))]
    if verification["audited"]:
        replayed = _open(checks.get("distance"))
        if replayed == "" and blame_of(open_codes[1]) == REQUEST:
            open_codes[1] = ""
        if open_codes[1] or blame_of(replayed) != REQUEST:
            open_codes.append(replayed)
    codes = [code for code in open_codes if code]
    if not codes:
        return "", ""
    worst = min(codes, key=lambda code: (BACKEND, OURS, REQUEST).index(blame_of(code)))
    return worst, blame_of(worst)


def blame_of(code: str) -> str:
    """Who kept a response from being decided: `request`, `ours` or, for every other code, `backend`."""
    if not code:
        return ""
    if code in _BY_REQUEST:
        return REQUEST
    return OURS if code in _BY_US or code.startswith("http_") else BACKEND


def code_of(reason: str) -> str:
    """The code that a reason begins with."""
    found = _CODE.match(reason)
    return found.group() if found else _OTHER


def _open(check: Mapping[str, Any] | None) -> str:
    """Code of what a check left open; empty where it decided or its score was merely borderline."""
    if check is None:
        return "not_checked"
    if check["result"] in _DECIDED:
        return ""
    code = code_of(check["reason"])
    return "" if code == "borderline" else code
