"""A pool with profiles of the toy model, so that its calibrated checks decide."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache

import msgspec
import orjson
import pytest
from redis import Redis

from policies import distance, margin
from policies.evidence import Evidence, Replay
from policies.profile import Profile, ProfileKey, fit
from policies.settings import Settings
from policies.unit import Unit, declaration_name, declaration_of
from policies.verification import Verification
from tests.verifier_pool import rig
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import context, jobs
from verifier_pool.judge import replay_choices
from verifier_pool.link.queue import (
    STANDINGS,
    intent_key,
    units_key,
)
from verifier_pool.reference.base import Reference
from verifier_pool.store import Store

RUNTIME = "vllm-0.32-v1-cpu"
WEBHOOK = {"url": "https://example.com/hook", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}


class Second(ToyReference):
    name = "toy 2"


@cache
def profile_of(name: str) -> Profile:
    """What honest toys with other kernels look like to the reference of that name."""
    reference = ToyReference()
    reference.name = name
    measured = []
    for seed in range(24):
        evidence = answer((seed, seed + 1), 48, kernels=seed + 1)
        (replay,) = replay_choices([evidence], reference, last_try=True)
        assert isinstance(replay, Replay)
        for each in (distance, margin):
            measured += each.calibration_rows(evidence, replay)
    return fit(measured, ProfileKey(model="toy", runtime=RUNTIME, precision="", reference=name))


def declared(url: str, **changes: object) -> Settings:
    backend = {"name": "honest", "url": "http://127.0.0.1:1", "model": "toy", "runtime": RUNTIME}
    return settings(url, backends=[backend], **changes)


def ready(
    redis: Redis,
    rules: Settings,
    first: Reference | None = None,
    second: Reference | None = None,
    stop: threading.Event | None = None,
) -> rig.Pool:
    """A worker with its context in place, which knows both profiles."""
    declared = rig.declaring(rules, first=first is not None, second=second is not None)
    store = Store(redis, verdict_ttl=600, webhook=rules.webhook is not None)
    profiles, second_profiles = {"toy": profile_of("toy 1")}, {"toy": profile_of("toy 2")}
    context.use(context.Context(declared, store, profiles, b"secret", second_profiles))
    return rig.Pool(redis, declared, first, second, stop)


def judged(
    pool: rig.Pool, redis: Redis, rules: Settings, evidence: Evidence, operator: bool | None = None
) -> tuple[Verification, Unit]:
    """The verification and the unit of an answer, which no fold has taken."""
    rig.submit(redis, rules, [evidence])
    if operator is not None:
        intent = orjson.loads(redis.get(intent_key(evidence.id)) or b"")
        redis.set(intent_key(evidence.id), orjson.dumps(intent | {"operator": operator}))
    redis.delete(units_key("honest"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "_fold", lambda *_: None)
        pool.serve(burst=True)
    verification = context.current().store.verdict(evidence.id)
    assert verification is not None
    (data,) = redis.lrange(units_key("honest"), 0, -1)
    return verification, msgspec.json.decode(data, type=Unit)


def rated(redis: Redis, rules: Settings, rate: float) -> None:
    """Give the backend a standing with this audit rate."""
    name = declaration_name(declaration_of(rules.backend("honest")))
    redis.hset(STANDINGS, f"honest:{name}", orjson.dumps({"state": "trusted", "audit_rate": rate}))


def lying(evidence: Evidence) -> Evidence:
    """An answer whose greedy token is not its claim's most probable: selection rejects it."""
    output = evidence.output_ids.copy()
    claim = evidence.claim_ids.copy()
    row = 5
    claim[row, [0, 4]] = claim[row, [4, 0]]
    logprobs = evidence.claim_logprobs.copy()
    logprobs[row, [0, 4]] = logprobs[row, [4, 0]]
    output[row] = claim[row, 0]
    return replace(evidence, output_ids=output, claim_ids=claim, claim_logprobs=logprobs)
