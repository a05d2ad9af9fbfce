"""Redis as the workers see it: evidence and intents in, each verdict out exactly once."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any, cast

import msgspec
from redis import Redis

from policies import codec
from policies.documents import document
from policies.errors import EvidenceError, SealError
from policies.receipt import Facts, digest, facts_of, facts_of_intent
from policies.unit import Unit, declaration_of
from policies.verification import Verification
from verifier_pool.link.queue import (
    AUDIT_SECRET,
    EVENT,
    OPEN,
    OUTBOX,
    audited_key,
    event_key,
    evidence_key,
    intent_key,
    verdict_key,
)
from verifier_pool.link.receipts import KeptCase, Settler
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.signing import Signer
from verifier_pool.traced import deciding


class Store:
    """Reads and writes under the names of `verifier_pool.link.queue`. Redis's own errors pass through.

    Args:
        verdict_ttl: seconds a verdict and its receipt are kept.
        webhook: whether verdicts also go to the outbox where no webhook is registered.
        signer: signs receipts; without one, as a process whose settings have no keys.
        sealer: opens evidence; without one, as a process whose settings have no keys.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        verdict_ttl: int,
        webhook: bool = False,
        signer: Signer | None = None,
        sealer: Sealer | None = None,
    ) -> None:
        self.redis = redis
        self.sealer = sealer or Sealer()
        self._verdict_ttl = verdict_ttl
        self._webhook = webhook
        self.signer = signer or Signer(redis)
        self._settler = Settler(redis, self.signer)

    def renew(self, verdict_ttl: int) -> None:
        """Keep verdicts that are stored from here on for so many seconds."""
        self._verdict_ttl = verdict_ttl

    def evidence(self, id: str) -> bytes | None:
        """Packed evidence, or None once it expired. Raises SealError where it was sealed and cannot be opened."""
        key = evidence_key(id)
        stored = cast("bytes | None", self.redis.get(key))
        return None if stored is None else self.sealer.open(stored, key.encode())

    def intent(self, id: str) -> dict[str, Any] | None:
        """The intent, or None when it is gone or unreadable."""
        return document(cast("bytes | None", self.redis.get(intent_key(id))))

    def verdict(self, id: str) -> Verification | None:
        """The verification with its owner, or None while there is none."""
        return document(cast("bytes | None", self.redis.get(verdict_key(id))))

    def decided(self, id: str) -> bool:
        """Whether a verdict is stored."""
        return bool(self.redis.exists(verdict_key(id)))

    def settle(
        self,
        verification: Verification,
        unit: Unit | None,
        facts: Facts | None = None,
        case: KeptCase | None = None,
    ) -> bool:
        """Store a verdict with its receipt and its unit, close its id and announce it, all at once. False when another
        came first.

        Args:
            facts: what its receipt says besides; without them, what the intent and the evidence know.
            case: what it rests on, where that is kept.

        Raises:
            ReceiptError, SealError: there is no key to sign with; nothing was stored.
        """
        told = None if unit is None else msgspec.json.encode(unit)
        known = self._facts(verification["id"]) if facts is None else facts
        with deciding(verification):
            return self._settler.settle(verification, told, known, self._verdict_ttl, webhook=self._webhook, case=case)

    def _facts(self, id: str) -> Facts:
        """What can be said of a response that is not judged: its evidence, where there is any, tells what was sent and
        served, unless it cannot be read."""
        intent = self.intent(id)
        try:
            evidence = self.evidence(id)
        except SealError:
            evidence = None
        if not evidence:
            return facts_of_intent(intent)
        try:
            choices = codec.unpack(evidence)
            if choices and all(choice.id == id for choice in choices):
                return facts_of(choices, intent, evidence, declared=declaration_of(choices[0]))
        except (EvidenceError, ValueError):
            pass
        return replace(facts_of_intent(intent), evidence=digest(evidence))

    def choose(self, id: str, chosen: bool, ttl: int) -> bool:
        """Keep the secret choice about a response for `ttl` seconds; returns the one that was made first.

        Between two runs of a job the rate may change, and a second choice could then hang on what the first run met.
        """
        pipeline = self.redis.pipeline()
        pipeline.set(audited_key(id), int(chosen), nx=True, ex=ttl)
        pipeline.get(audited_key(id))
        return bool(int(pipeline.execute()[1] or chosen))

    def overdue(self, now: float, limit: int) -> list[str]:
        """Ids without a verdict whose time is up, oldest first."""
        return [id.decode() for id in cast("list[bytes]", self.redis.zrangebyscore(OPEN, "-inf", now, 0, limit))]

    def postpone(self, id: str, until: float) -> None:
        """Look again later; an id that was closed meanwhile stays closed."""
        self.redis.zadd(OPEN, {id: until}, xx=True)

    def event(self, name: str) -> bytes | None:
        """Body of the event that an entry of the outbox names; None once it expired."""
        return cast("bytes | None", self.redis.get(event_key(name.removeprefix(EVENT))))

    def outbox(self, limit: int) -> list[str]:
        """What webhooks were not told of yet, oldest first: ids of verdicts, and names of events."""
        return [id.decode() for id in cast("list[bytes]", self.redis.zrange(OUTBOX, 0, limit - 1))]

    def sent(self, id: str) -> None:
        """Take an entry out of the outbox."""
        self.redis.zrem(OUTBOX, id)

    def audit_secret(self) -> bytes:
        """The secret that picks audits, made once and shared by all workers."""
        self.redis.set(AUDIT_SECRET, secrets.token_bytes(32), nx=True)
        return cast(bytes, self.redis.get(AUDIT_SECRET))
