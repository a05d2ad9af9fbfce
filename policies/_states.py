"""Which state a record is in, and what it takes to leave it."""

from __future__ import annotations

import math

from policies import _corroboration, _folding
from policies._tails import binomial_tail
from policies.record import QUARANTINED, SUSPECT, TRIAL, TRUSTED, Record
from policies.settings import StandingSettings

REPLAYED_SHARE = 4
"""One in this many of the decided generations that trust takes must have been judged by a replay."""
SLACK = 0.05
"""Coverage by which a trusted backend may fall short before it is a suspect."""
FAULTS_LEVEL = 1e-3
"""Probability under which so much missing evidence is no accident."""


def decide(record: Record, rules: StandingSettings) -> tuple[str, tuple[str, ...]]:
    """The state and, in plain words, why.

    An accusation or the operator's hand quarantines, and only the operator ends that. A worry makes a suspect, and so
    does whatever a trusted backend no longer fulfils. Otherwise it is trusted once nothing is lacking.
    """
    if record.held:
        return QUARANTINED, (f"by hand: {record.held}",)
    if record.accused is not None:
        return QUARANTINED, (_accused(record),)
    worries = _worries(record, rules)
    lacking = _lacking(record, rules)
    if worries or (lacking and record.trusted_once):
        return SUSPECT, (*worries, *lacking)
    return (TRIAL, lacking) if lacking else (TRUSTED, (_trust(record),))


def _worries(record: Record, rules: StandingSettings) -> tuple[str, ...]:
    """What speaks against it without sufficing. A suspect is let go later than it was made one."""
    found = []
    if record.change:
        found.append(f"it does not run its declared runtime: {record.change}")
    enough = _folding.needed(record.number, rules.alpha)
    was = record.state == SUSPECT
    evidence = record.log_evidence
    if evidence >= enough:
        found.append(_uncorroborated(record))
    elif evidence >= enough / (4 if was else 2):
        found.append(f"evidence against it is {_power(evidence)} of {_power(enough)}")
    return tuple(found)


def _lacking(record: Record, rules: StandingSettings) -> tuple[str, ...]:
    """What keeps it from being trusted."""
    earned, found = record.earned, []
    if record.declaration.get("speculative"):
        found.append("speculative decoding is declared, so its sampling cannot be checked exactly")
    if earned.decided < rules.trusted_after:
        found.append(f"{earned.decided} of {rules.trusted_after} answers decided")
    replays = math.ceil(rules.trusted_after / REPLAYED_SHARE)
    if earned.replayed < replays:
        found.append(f"{earned.replayed} of {replays} answers judged by a replay")
    least = rules.least_coverage - (SLACK if record.state == TRUSTED else 0.0)
    if earned.recent is not None and earned.recent < least:
        found.append(f"only {earned.recent:.0%} of what could be decided was, {rules.least_coverage:.0%} is needed")
    if _withholds(record, rules.fault_rate):
        share = f"{rules.fault_rate:.1%} are allowed"
        found.append(f"evidence is missing from {earned.withheld} of {earned.asked} answers, {share}")
    return tuple(found)


def _withholds(record: Record, fault_rate: float) -> bool:
    """To become trusted a backend may not have left out more than the stated rate allows. It loses that trust when
    what is missing is no longer explained by chance at that rate."""
    withheld, asked = record.earned.withheld, record.earned.asked
    if not record.trusted_once:
        return withheld > fault_rate * asked
    return binomial_tail(asked, fault_rate, withheld) <= FAULTS_LEVEL


def _accused(record: Record) -> str:
    accused = record.accused
    assert accused is not None
    checks = "exact checks" if accused.basis == "exact" else "replays, corroborated"
    return f"accused by {checks}: evidence 10^{accused.log10:.1f} at unit {accused.n}, level {accused.level:.1e}"


def _uncorroborated(record: Record) -> str:
    keys = _corroboration.speakers(record.heard)
    who = {0: "no client key", 1: "one client key", 2: "two client keys"}.get(keys, "few client keys")
    return f"evidence suffices, but rests on what {who} asked: it must stand without any two of them"


def _trust(record: Record) -> str:
    return f"{record.earned.decided} answers decided, {record.earned.replayed} of them by a replay"


def _power(log: float) -> str:
    return "0" if log == -math.inf else f"10^{log / math.log(10):.1f}"
