"""Whether the ledger finds what is missing: every witness contradicted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chaos.aof import Writes
from benchmarks.chaos.ledger import Away, Kept, Ledger, Served, settle
from benchmarks.chaos.traffic import Asked
from policies.settings import hash_key

KEYS = ["sk-a", "sk-b"]
ID = "a" * 32
OTHER = "b" * 32


def asked(number: int = 1, id: str = ID, **changes: Any) -> Asked:
    first = Asked(number, 0, "toy", "honest-toy", True, "async", "proxy-1", 100.0 + number, 100.5 + number, 200, id)
    return replace(first, **{"outcome": "complete", **changes})


def verdict(id: str = ID, word: str = "pass", reason: str = "", created: float = 101.1) -> dict[str, Any]:
    owner = {"owner": hash_key(KEYS[0]), "backend": "honest-toy", "created": created}
    return {"id": id, "verdict": word, "reasons": [reason] if reason else [], "audited": True, **owner}


def intent(id: str = ID, created: float = 101.1) -> dict[str, Any]:
    return verdict(id, created=created) | {"stream": True, "mode": "async"}


def kept(*verdicts: dict[str, Any], **changes: Any) -> Kept:
    by_id = {str(each["id"]): each for each in verdicts}
    counted = Counter(str(each["backend"]) for each in verdicts)
    return replace(Kept(by_id, by_id, (), {}, counted, 0, 0, tuple(by_id)), **changes)


def written(*ids: str) -> Writes:
    return Writes(*(Counter(ids) for _ in range(5)))


def ledger(
    clients: list[Asked],
    found: Kept,
    writes: Writes | None = None,
    away: list[Away] | None = None,
    kind: str = "honest",
) -> Ledger:
    log = [Served(each.number, kind, each.sent, True) for each in clients]
    return settle(clients, log, found, writes or written(*found.verdicts), away or [], KEYS)


def clean(found: Ledger) -> bool:
    return not (found.lost or found.duplicates or found.wrong)


def test_a_judged_answer_is_neither_lost_nor_doubled() -> None:
    found = ledger([asked()], kept(verdict()))
    assert clean(found)
    assert (found.sent, found.accepted, found.verdicts, found.matched) == (1, 1, {"pass": 1}, {"header": 1})


def test_an_id_that_a_client_was_told_is_missed_even_when_redis_forgot_everything_of_it() -> None:
    found = ledger([asked()], kept())
    assert found.lost == [f"{ID}: accepted, and there is no verdict"]


def test_an_intent_without_a_verdict_is_lost_although_no_client_knows_its_id() -> None:
    found = ledger([asked(id="", status=0)], kept(intents={ID: intent()}), written(ID))
    assert f"{ID}: accepted, and there is no verdict" in found.lost


def test_what_a_client_was_told_is_not_recorded_is_not_lost() -> None:
    found = ledger([asked(unrecorded=True), asked(2, OTHER, unrecorded=True)], kept(verdict(OTHER)))
    assert clean(found)
    assert found.told_unrecorded == {"and never recorded": 1, "and recorded later": 1}
    assert found.accepted == 1


def test_served_and_unknown_is_lost_unless_the_proxy_held_redis_for_away() -> None:
    nothing = asked(id="", status=0, outcome="broken")
    assert ledger([nothing], kept()).lost == ["marker 1: served by the backend, and nobody knows it"]
    found = ledger([nothing], kept(), away=[Away("proxy-1", 101.4, 102.0)])
    assert clean(found)
    assert found.undelivered == 1
    for elsewhere in (Away("proxy-2", 101.4, 102.0), Away("proxy-1", 90.0, 99.0), Away("proxy-1", 104.0, 109.0)):
        assert ledger([nothing], kept(), away=[elsewhere]).lost


def test_evidence_tells_whose_it_is_before_elimination_does() -> None:
    clients = [asked(1, ""), asked(2, "")]
    found = ledger(clients, kept(verdict(created=102.5), verdict(OTHER, created=102.2), markers={OTHER: 1}))
    assert clean(found)
    assert found.matched == {"evidence": 1, "elimination": 1}
    assert [(row["number"], row["id"]) for row in found.rows] == [(1, OTHER), (2, ID)]


@pytest.mark.parametrize("other", [{"client": 1}, {"backend": "cheating-toy"}, {"sent": 101.2}])
def test_elimination_takes_the_same_clients_same_request_and_no_later_one(other: dict[str, Any]) -> None:
    found = ledger([replace(asked(id=""), **other)], kept(verdict()))
    assert found.wrong == [f"{ID}: recorded, and nobody asked for it"]


def test_a_second_write_is_a_duplicate_wherever_it_shows() -> None:
    for what in ("verdicts", "units", "outbox"):
        writes = written(ID)
        getattr(writes, what)[ID] += 1
        assert len(ledger([asked()], kept(verdict()), writes).duplicates) == 1
    assert ledger([asked()], kept(verdict(), counted={"honest-toy": 2})).duplicates


def test_what_standing_or_the_outbox_misses_is_lost() -> None:
    assert len(ledger([asked()], kept(verdict(), counted={}, unfolded=1)).lost) == 1
    assert len(ledger([asked()], kept(verdict(), outbox=())).lost) == 1
    assert len(ledger([asked()], kept(verdict(), waiting=(ID,))).lost) == 1


def test_wrong_words_are_told() -> None:
    cases: list[tuple[Callable[[], Ledger], bool]] = [
        (lambda: ledger([asked()], kept(verdict(word="reject"))), True),
        (lambda: ledger([asked()], kept(verdict(word="pass")), kind="hotter"), True),
        (lambda: ledger([asked()], kept(verdict(word="reject")), kind="hotter"), False),
        (lambda: ledger([asked()], kept(verdict(word="unaudited")), kind="other_model"), False),
        (lambda: ledger([asked(verdict="inconclusive")], kept(verdict())), True),
        (lambda: ledger([asked(verdict="pending")], kept(verdict())), False),
    ]
    for made, wrong in cases:
        assert bool(made().wrong) is wrong


def test_reasons_are_counted_for_what_was_not_verified() -> None:
    found = ledger([asked()], kept(verdict(word="unverified", reason="proxy_lost")))
    assert clean(found)
    assert found.reasons == {"proxy_lost": 1}
