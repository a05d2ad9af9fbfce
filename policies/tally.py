"""What is counted of a backend's verdicts, as names of counters: their words, what each check said and why, tokens.

Redis counts them in the step that stores the verdict, and tokens in the one that counts them in a record
(`verifier_pool.link.scripts`), so each counts once, whatever the backend is declared to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_CODE = re.compile(r"[a-z][a-z0-9_]{0,47}")
_OTHER = "other"

SERVED = "tokens|served"
"""Counter of output tokens in the records of a backend, over all its declarations and lives."""
DECIDED = "tokens|decided"
"""Of these, those that verdicts decided."""

Counted = tuple[str, ...]
"""The parts of a counter's name."""


class Names(NamedTuple):
    """Counters by what they are about: `verdicts` by word, `audited`, `reasons` by word of the verdict and code of the
    reason, `checks` by check, result and code of the reason (empty on a pass), `tokens` by `served` or `decided`."""

    verdicts: dict[Counted, int]
    audited: int
    reasons: dict[Counted, int]
    checks: dict[Counted, int]
    tokens: dict[str, int]


def fields(verification: Mapping[str, Any]) -> list[str]:
    """Names of the counters that go up by one with this verification."""
    word = _word(verification.get("verdict"))
    names = [f"verdict|{word}"]
    if verification.get("audited"):
        names.append("audited")
    codes = dict.fromkeys(code_of(reason) for reason in verification.get("reasons", ()))
    names += [f"reason|{word}|{code}" for code in codes]
    for check in verification.get("checks", ()):
        reason = check["reason"]
        code = code_of(reason) if reason else ""
        names.append(f"check|{_word(check['name'])}|{_word(check['result'])}|{code}")
    return names


def read(counters: Iterable[tuple[str, int]]) -> Names:
    """What the counters say; names that none of `fields` has are left out."""
    found = Names({}, 0, {}, {}, {"served": 0, "decided": 0})
    audited = 0
    for name, count in counters:
        kind, *parts = name.split("|")
        match kind, len(parts):
            case "verdict", 1:
                found.verdicts[tuple(parts)] = count
            case "reason", 2:
                found.reasons[tuple(parts)] = count
            case "check", 3:
                found.checks[tuple(parts)] = count
            case "tokens", 1:
                found.tokens[parts[0]] = count
            case "audited", 0:
                audited = count
    return found._replace(audited=audited)


def code_of(reason: str) -> str:
    """The code that a reason begins with; `other` where there is none."""
    return _word(reason.partition(":")[0].strip())


def _word(text: object) -> str:
    return text if isinstance(text, str) and _CODE.fullmatch(text) else _OTHER
