"""What a policy says of one sample and of a batch.

A sample passes when every accept bound holds (a value that is not finite fails), is rejected when a reject bound or
branch holds (a value that is not finite never does), and is inconclusive in between. No null hypothesis is tested and
no error rate is controlled: these are LMCV's rules as they stand, for comparison with the calibrated distance check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.lmcv.rules import JUDGMENT_FUNCTION_VERSION, TOKEN_SCOPE, Bound, Policy

PASS, REJECT, INCONCLUSIVE, PASS_STRICT = "PASS", "REJECT", "INCONCLUSIVE", "PASS_STRICT"

EVIDENCE = "missing_evidence_count"
"""Rows the worker left out. LMCV never looks: it compares the rows it was given. Any one rejects here."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One sample under one policy.

    Attributes:
        verdict: the policy's pass word, REJECT or INCONCLUSIVE.
        accept_failures, reject_hits: metrics (or branches) in the policy's order.
        notes: what limits the decision, such as another K than the thresholds were measured at.
    """

    verdict: str
    reason: str
    policy: str
    policy_version: str
    policy_k: int
    k: int | None
    accept_failures: tuple[str, ...] = ()
    reject_hits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    judgment_function_version: str = JUDGMENT_FUNCTION_VERSION
    token_scope: str = TOKEN_SCOPE


@dataclass(frozen=True, slots=True)
class Outcome:
    """One bound against one value; `passed` means that the bound holds, also for a reject bound."""

    metric: str
    op: str
    threshold: float
    value: float
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """A batch under one policy: PASS_STRICT, REJECT or INCONCLUSIVE."""

    verdict: str
    reason: str
    policy: str
    policy_version: str
    policy_k: int
    k: int | None
    sample_count: int
    sample_pass_rate: float
    sample_reject_rate: float
    sample_verdict_counts: dict[str, int]
    accept_checks: tuple[Outcome, ...] = ()
    reject_checks: tuple[Outcome, ...] = ()
    notes: tuple[str, ...] = ()
    judgment_function_version: str = JUDGMENT_FUNCTION_VERSION
    token_scope: str = field(default=TOKEN_SCOPE)

    @property
    def passed(self) -> bool:
        """Whether the batch passed."""
        return self.verdict == PASS_STRICT


def verdict(metrics: Mapping[str, float], policy: Policy, *, k: int | None = None) -> Decision:
    """What the policy says of one sample's metrics (`summary.summarise`, or a row of LMCV's own summaries).

    Args:
        metrics: a metric that is absent counts as not finite.
        k: alternatives per position the metrics were computed from; None when unknown.
    """
    failures = evaluate(metrics, policy.accept)
    hits = evaluate(metrics, policy.reject) + tuple(b.name for b in policy.branches if b.holds(metrics))
    if metrics.get(EVIDENCE, 0.0) > 0:
        failures, hits = (EVIDENCE, *failures), (EVIDENCE, *hits)
    word, reason = _word(metrics, policy, failures, hits)
    return Decision(word, reason, policy.name, policy.version, policy.k, k, failures, hits, k_notes(policy, k))


def batch_verdict(
    overall: Mapping[str, float], words: Sequence[str], policy: Policy, *, k: int | None = None
) -> BatchDecision:
    """What the policy says of a batch: pooled metrics of all tokens, and the verdict of every sample.

    The samples are fixed beforehand; one that could not be verified belongs in `words` as INCONCLUSIVE. A policy
    without a batch rule is inconclusive.
    """
    counts = {word: list(words).count(word) for word in (policy.pass_word, REJECT, INCONCLUSIVE)}
    total = max(len(words), 1)
    rates = counts[policy.pass_word] / total, counts[REJECT] / total
    rule = policy.batch
    accept = tuple(_outcome(bound, overall, "accept") for bound in rule.accept) if rule else ()
    reject = tuple(_outcome(bound, overall, "reject") for bound in rule.reject) if rule else ()
    word, reason = _batch_word(overall, len(words), rates, policy, accept, reject)
    return BatchDecision(
        word,
        reason,
        policy.name,
        policy.version,
        policy.k,
        k,
        len(words),
        *rates,
        counts,
        accept,
        reject,
        k_notes(policy, k),
    )


def evaluate(metrics: Mapping[str, float], bounds: Sequence[Bound]) -> tuple[str, ...]:
    """Accept bounds that fail, or reject bounds that hold, by metric and in order."""
    rejects = {">", "<"}
    return tuple(
        bound.metric
        for bound in bounds
        if bound.holds(metrics.get(bound.metric, float("nan"))) == (bound.op in rejects)
    )


def k_notes(policy: Policy, k: int | None) -> tuple[str, ...]:
    """Why the policy's thresholds may not apply."""
    if k is None:
        return (f"k_unknown: the thresholds were measured at K={policy.k}",)
    if k != policy.k:
        return (f"k_differs: the thresholds were measured at K={policy.k} and are not valid at K={k}",)
    return ()


def _word(
    metrics: Mapping[str, float], policy: Policy, failures: tuple[str, ...], hits: tuple[str, ...]
) -> tuple[str, str]:
    count, finite = metrics.get("count", 0.0), metrics.get("finite_count", 0.0)
    if EVIDENCE in hits:
        return REJECT, f"{metrics[EVIDENCE]:.0f} served tokens have no evidence"
    if not count >= policy.tokens:
        return INCONCLUSIVE, f"{count:.0f} tokens, {policy.tokens} are needed"
    if not finite >= policy.finite:
        return INCONCLUSIVE, f"{finite:.0f} positions to compare, {policy.finite} are needed"
    if policy.accept and not failures:
        return policy.pass_word, "every accept bound holds"
    if hits:
        return REJECT, f"beyond a reject bound: {', '.join(hits)}"
    return INCONCLUSIVE, f"between the bounds: {', '.join(failures)}"


def _batch_word(
    overall: Mapping[str, float],
    samples: int,
    rates: tuple[float, float],
    policy: Policy,
    accept: tuple[Outcome, ...],
    reject: tuple[Outcome, ...],
) -> tuple[str, str]:
    rule = policy.batch
    if rule is None:
        return INCONCLUSIVE, "the policy has no rule for batches"
    breached = [outcome.metric for outcome in reject if outcome.passed]
    if breached:
        return REJECT, f"beyond a reject bound: {', '.join(breached)}"
    if overall.get(EVIDENCE, 0.0) > 0:
        return REJECT, f"{overall[EVIDENCE]:.0f} served tokens have no evidence"
    tokens = overall.get("count", 0.0)
    if samples < rule.samples or tokens < rule.tokens:
        return INCONCLUSIVE, f"{samples} samples and {tokens:.0f} tokens; {rule.samples} and {rule.tokens} are needed"
    failed = [outcome.metric for outcome in accept if not outcome.passed]
    if failed:
        return INCONCLUSIVE, f"between the bounds: {', '.join(failed)}"
    if rates[0] < rule.pass_rate or rates[1] > rule.reject_rate:
        return INCONCLUSIVE, f"{rates[0]:.1%} of the samples pass and {rates[1]:.1%} are rejected"
    return PASS_STRICT, "every accept bound holds, for the batch and for enough of its samples"


def _outcome(bound: Bound, metrics: Mapping[str, float], kind: str) -> Outcome:
    value = metrics.get(bound.metric, float("nan"))
    holds = bound.holds(value)
    words = f"{kind} bound {'holds' if holds else 'does not hold'}"
    return Outcome(bound.metric, bound.op, bound.threshold, value, holds, words)
