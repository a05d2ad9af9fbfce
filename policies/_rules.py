"""Sections of the settings about what becomes of an answer: time-outs, verification, audits, standing, webhook."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator

from policies._deliveries import RETRIES
from policies._sections import Section


class TimeoutSettings(Section):
    """How long anything on the way of a request may take, in seconds.

    Attributes:
        connect: until a backend takes the connection.
        first_byte: from the request going up to the answer's first byte, in a stream to its first event with data
            (comments are none).
        idle: between two reads from a backend.
        client: in which a client takes nothing of what there is for it, and is given up.
        total: over everything, the queue and the client's reading included.
    """

    connect: float = Field(5.0, gt=0)
    first_byte: float = Field(300.0, gt=0)
    idle: float = Field(120.0, gt=0)
    client: float = Field(120.0, gt=0)
    total: float = Field(3600.0, gt=0)


class VerificationSettings(Section):
    """How verdicts reach clients, and how long anything waits for one.

    Attributes:
        mode: whether an answer waits for its verdict (`inline`) or not (`async`), where the request's header
            `x-countersign-mode` does not say.
        on_reject: what becomes of a rejected answer, only where it is inline and not streamed: `annotate` delivers it
            with its verdict, `block` answers 502 instead, `retry` asks another backend, and answers 502 when that one
            is rejected too or there is none.
        inline_wait: seconds that an inline answer waits at most; its verdict is then `pending`.
        evidence_ttl: seconds that evidence is kept in Redis.
        verdict_ttl: seconds that a verdict can be asked for.
        job_timeout: seconds that one job of a worker may take; one that takes longer is tried again.
    """

    mode: Literal["async", "inline"] = "async"
    on_reject: Literal["annotate", "block", "retry"] = "annotate"
    inline_wait: float = Field(30.0, gt=0)
    evidence_ttl: int = Field(3600, gt=0)
    verdict_ttl: int = Field(7 * 86400, gt=0)
    lost_after: int = Field(900, gt=0, description="seconds after which an intent without a verdict is lost")
    max_backlog: int = Field(10_000, gt=0, description="queued generations beyond which new ones are shed")
    max_backlog_bytes: int = Field(2**30, gt=0, description="packed evidence that waits beyond which new one is shed")
    replay_wait: int = Field(900, gt=0, description="seconds after which an audit is judged without its replay")
    job_timeout: int = Field(300, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> VerificationSettings:
        if self.replay_wait >= self.evidence_ttl:
            raise ValueError("replay_wait must be shorter than evidence_ttl, or evidence is gone before it is given up")
        if self.verdict_ttl < self.evidence_ttl:
            raise ValueError("verdict_ttl must not be shorter than evidence_ttl, or an answer is judged twice")
        return self


class DurabilitySettings(Section):
    """What Redis must have done with an intent or with evidence before it counts as accepted.

    Attributes:
        aof: Redis has written it to its append-only file (WAITAOF).
        replicas: so many of Redis' replicas have it, in their files too with `aof`.
        timeout: seconds that this may take, after which it counts as not written.
    """

    aof: bool = False
    replicas: int = Field(0, ge=0)
    timeout: float = Field(2.0, gt=0)


class AuditSettings(Section):
    """Which generations are replayed.

    Attributes:
        rate: share of all answers, whoever gave them. Without one it follows each backend's standing
            (`policies.audit.rate`): everything of a new or re-declared backend, less as decided answers accumulate,
            never under `floor`, and more again with suspicion.
        floor: the least share of an honest backend's answers.
        full: share of the audits, as secretly chosen, whose replay also takes the reference's own top 20. Only those
            can pass: the others know no candidate that the claim left out.
        secret: what the choice is drawn from, any long random text; without one a random one is kept in Redis.
    """

    rate: float | None = Field(None, ge=0, le=1)
    floor: float = Field(0.05, gt=0, le=1)
    full: float = Field(0.25, ge=0, le=1)
    secret: SecretStr | None = None


class StandingSettings(Section):
    """When a backend is accused, and what it takes to be trusted (`policies.standing`).

    Attributes:
        alpha: probability at most, over a backend's whole life and however often one looks, that it is accused although
            it is honest. Calibrated checks add their profile's `delta`.
        fault_rate: share of answers in which an honest backend may fail an exact check or leave evidence out.
        key_allowance: answers of one client key that count in a day for certain, and by how many its count may exceed
            that of the third most counted key. Beyond, the n-th counts with chance limit/n. Keys marked `operator` are
            not limited.
        trusted_after: decided answers before a backend is trusted.
        least_coverage: share of what a backend's answers let be decided that must have been, in tokens.
        suspect_share: part of a suspect's turns that it still gets while others could serve.
    """

    alpha: float = Field(1e-6, gt=0, le=0.1)
    fault_rate: float = Field(1e-3, gt=0, le=0.1)
    key_allowance: int = Field(32, gt=0)
    trusted_after: int = Field(200, gt=0)
    least_coverage: float = Field(0.9, gt=0, le=1)
    suspect_share: float = Field(0.1, ge=0, le=1)


class WebhookSettings(Section):
    """A webhook of the operator's: it hears of every answer and backend. Others are registered (see `deliveries`).

    Attributes:
        url: address of the receiver.
        secret: what signs them: `whsec_` and base64; two of them, with a space between, while one replaces the other.
        retries: seconds before each further attempt when a delivery fails; after the last it is given up.
    """

    url: Annotated[str, Field(pattern=r"^https?://")]
    secret: SecretStr
    allow_private: bool = Field(False, description="allow private and loopback receivers")
    retries: tuple[int, ...] = RETRIES
