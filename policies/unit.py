"""One unit of evidence about a backend: what one verified response says for or against it, without its content.

One unit is one response. Where it has several choices, one of them speaks, secretly chosen: its choices share a
prompt and are not independent, and the worst of n would fail n times as often as the null allows. The same prompt
with the same seed for the same client key is the same unit, however often it is asked.

A unit holds *outcomes*: per process (`PROCESSES`) a number in [0, 1] and, for the calibrated ones, the bound `mu0` on
its honest mean. A process that could not judge the response has none.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from policies import coverage
from policies._request import read_leniently
from policies.evidence import Evidence
from policies.verification import Verification

EXACT = ("selection", "structure", "withheld")
"""Processes whose null is exact given a stated fault rate."""
REPLAYED = ("distance", "margin", "routing", "forged")
"""Processes that speak of a replay: the first three calibrated, the last with a measured null."""
PROCESSES = EXACT + REPLAYED

CLIENT_SEED = "client_seed"
REPEATED = "repeated"
KEY_SHARE = "key_share"
EARLIER_LIFE = "earlier_life"
"""Why a unit stays outside the evidence: its seed was the client's; it was counted already; its client key has had its
share of the day; it was served before the pardon that began this life."""

_ASKING = ("messages", "prompt", "tools", "chat_template", "chat_template_kwargs", "documents")
"""Fields of a request that make its prompt."""


class Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one verified response says about its backend.

    Attributes:
        id: the verification's.
        at: Unix seconds of the verdict. `served`: of the request.
        backend, declaration: its name; what it was declared to run, as `declaration_of` has it.
        key: keyed hash of the client key. `operator`: the operator's own traffic.
        unit, prompt: keyed hashes of (key, prompt, seed) and of the prompt; empty where unknown.
        tokens: output tokens of the whole response.
        verdict: its word. `audited`: a replay was asked for. `replayed`: the distance check decided.
        undecided: code of what kept it from being decided, empty where it was; `blame` says who did
            (`policies.coverage`).
        outcomes: by process, (x, mu0); mu0 is 0 where the null is a rate and not a profile's.
        profile, delta: name and calibration error of the profile that `outcomes` rest on.
        outside: why it stays outside the evidence, or nothing. `draw`: uniform in [0, 1), secret; decides whether a
            key that has had its allowance of the day is counted once more.
    """

    id: str
    at: float
    backend: str
    declaration: dict[str, str]
    key: str = ""
    operator: bool = False
    unit: str = ""
    prompt: str = ""
    tokens: int = 0
    verdict: str = ""
    audited: bool = False
    replayed: bool = False
    undecided: str = ""
    blame: str = ""
    outcomes: dict[str, tuple[float, float]] = {}
    profile: str = ""
    delta: float = 0.0
    outside: str = ""
    draw: float = 0.0
    served: float = 0.0


def of_response(
    choices: Sequence[Evidence],
    verification: Verification,
    secret: bytes,
    *,
    operator: bool,
    profile: str = "",
    delta: float = 0.0,
) -> Unit:
    """The unit of one judged response.

    Args:
        verification: as `policies.verification.describe` made it of these choices, without any replay that was made
            for what the answer or its CPU checks said: that was no choice of the past and the secret.
        operator: the response answered the operator's own traffic.
        profile, delta: of the profile its calibrated checks were held against.
    """
    first = choices[0]
    spoken = choices[_speaks(secret, first.id, len(choices))]
    checks = _checks(verification, spoken.index)
    key = digest(secret, b"key/" + first.owner.encode())
    prompt = digest(secret, b"prompt/" + _asked(spoken))
    undecided, blame = coverage.of(verification)
    return Unit(
        id=first.id,
        at=float(verification["decided"]),
        backend=first.backend,
        declaration=declaration_of(first),
        key=key,
        operator=operator,
        unit=digest(secret, f"unit/{key}/{prompt}/{first.sampling.seed}".encode()),
        prompt=prompt,
        tokens=sum(len(choice.output_ids) for choice in choices),
        verdict=str(verification["verdict"]),
        audited=bool(verification["audited"]),
        replayed=any(check["name"] == "distance" and check["result"] in ("pass", "reject") for check in checks),
        undecided=undecided,
        blame=blame,
        outcomes=outcomes(checks),
        profile=profile,
        delta=delta,
        outside=CLIENT_SEED if any(choice.sampling.client_seed for choice in choices) else "",
        draw=int(digest(secret, f"draw/{first.id}".encode()), 16) / 2**64,
        served=first.created,
    )


def of_unverified(verification: Verification, declaration: Mapping[str, str], tokens: int = 0) -> Unit:
    """The unit of a response that nobody checked: it only lowers the coverage."""
    undecided, blame = coverage.of(verification)
    return Unit(
        id=str(verification["id"]),
        at=float(verification["decided"]),
        backend=str(verification["backend"]),
        declaration=dict(declaration),
        tokens=tokens,
        verdict=str(verification["verdict"]),
        undecided=undecided,
        blame=blame,
        served=float(verification["created"]),
    )


def declaration_of(declared: Any) -> dict[str, str]:
    """What a backend is declared to run: of an `Evidence`, or of a `BackendSettings`. Another one is another record."""
    return {
        "model": declared.model,
        "runtime": declared.runtime,
        "precision": declared.precision,
        "engine": declared.engine,
        "speculative": "yes" if declared.speculative else "",
    }


def declaration_name(declaration: Mapping[str, str]) -> str:
    """Names a declaration: 16 hex digits of the SHA-256 of its fields."""
    text = "\0".join(f"{name}={declaration[name]}" for name in sorted(declaration))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def outcomes(checks: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Outcomes of one choice's checks, as `policies.verification.describe_check` gives them.

    `selection` and `structure` fail where they reject; what they leave undecided says nothing. `withheld` fails where
    any check misses evidence. A calibrated outcome is 1 where the score lies beyond every calibrated one by the bar
    (`profile.Placement.exceeds`), whose honest probability is at most the profile's `mu0`; `forged` is 1 where margin
    finds a token that no drift explains.
    """
    found: dict[str, tuple[float, float]] = {}
    for check in checks:
        name, result, metrics = check["name"], check["result"], check["metrics"]
        if name in EXACT and result in ("pass", "reject", "withheld"):
            found[name] = (float(result == "reject"), 0.0)
        if name in REPLAYED and metrics.get("exceeds") is not None and metrics.get("mu0"):
            found[name] = (float(metrics["exceeds"]), float(metrics["mu0"]))
        if name == "margin" and metrics.get("forged") is not None:
            found["forged"] = (float(metrics["forged"]), 0.0)
    if checks:
        found["withheld"] = (float(any(check["result"] == "withheld" for check in checks)), 0.0)
    return found


def digest(secret: bytes, data: bytes) -> str:
    """Keyed hash, 16 hex digits (64 bits): tells equal from different, and nothing else, without the secret."""
    return hmac.digest(secret, data, "sha256")[:8].hex()


def _asked(choice: Evidence) -> bytes:
    """What was asked, from the request alone: what the backend says the prompt was may be a lie."""
    try:
        body = orjson.loads(choice.request)
        return orjson.dumps({name: body.get(name) for name in _ASKING}, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, AttributeError, TypeError):
        pass
    odd = read_leniently(choice.request)
    if odd is None:
        return choice.request or choice.prompt_ids.tobytes()
    return json.dumps({name: odd.get(name) for name in _ASKING}, sort_keys=True).encode()


def _speaks(secret: bytes, id: str, choices: int) -> int:
    return int.from_bytes(hmac.digest(secret, f"choice/{id}".encode(), "sha256")[:8], "big") % choices


def _checks(verification: Verification, index: int) -> list[Mapping[str, Any]]:
    for choice in verification.get("choices", ()):
        if choice["index"] == index:
            return list(choice["checks"])
    return list(verification["checks"])
