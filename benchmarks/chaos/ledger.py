"""Who is missing, and who was counted twice: what was sent against what was accepted, judged and counted.

The columns, each from a witness of its own:

* *sent*: the scripted backend's log, on its disk before the first byte of an answer left it.
* *accepted*: ids whose intent Redis kept, by its append-only file, and ids that a proxy told a client without the
  mark `x-countersign-reason: store_unavailable`. Were an acknowledged intent lost, the client would still know the id.
* *verdicts*: `verdict:ID` as it stands in the end; how often it was written, and how often its unit was queued for
  standing, by the append-only file; the units that records of standing counted, and the outbox.

A request and its id are matched, in this order, by what the client saw (`x-countersign-id`), by the marker in the
evidence, and by elimination: an id that only an intent names belongs to the client whose key it carries, who asks one
thing at a time, hence to that client's last unmatched request for that backend in that form sent before the intent was
made.

*Lost* is an accepted id without exactly one verdict, and a request the backend served that no id was found for although
nobody said that it is not recorded. It was said by the proxy to the client, in the answer's head; where not even the
head came (the client left, or the proxy was killed), by the proxy's log: it held Redis for away when it would have
written the intent. *Duplicates* are verdicts or units written more than once, and units counted more often than there
are verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.chaos.aof import Writes
from benchmarks.chaos.traffic import Asked
from policies.settings import hash_key

PROMPTLY = 1.6
"""Seconds after a request was sent within which its intent is written, or given up."""


@dataclass(frozen=True, slots=True)
class Served:
    """A request in the backend's log. `complete`: its whole answer was written to the connection."""

    number: int
    kind: str
    at: float
    complete: bool


@dataclass(frozen=True, slots=True)
class Away:
    """From when to when (Unix seconds) a proxy held Redis for away, by its own log."""

    proxy: str
    since: float
    until: float


@dataclass(frozen=True, slots=True)
class Kept:
    """What Redis holds in the end.

    Attributes:
        intents, verdicts: documents by id. `waiting`: ids it still expects a verdict for.
        markers: by id, the marker in its evidence.
        counted: by backend, generations in its records of standing. `unfolded`, `dropped`: units not in them.
        outbox: ids in the outbox.
    """

    intents: Mapping[str, Mapping[str, Any]]
    verdicts: Mapping[str, Mapping[str, Any]]
    waiting: Sequence[str]
    markers: Mapping[str, int]
    counted: Mapping[str, int]
    unfolded: int
    dropped: int
    outbox: Sequence[str]


@dataclass(slots=True)
class Ledger:
    """The sums, and every id or marker that stands against the product, with what is wrong."""

    asked: int = 0
    sent: int = 0
    accepted: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    told_unrecorded: Counter[str] = field(default_factory=Counter)
    undelivered: int = 0
    never_sent: int = 0
    matched: Counter[str] = field(default_factory=Counter)
    cheats: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


def settle(
    asked: Sequence[Asked],
    served: Iterable[Served],
    kept: Kept,
    writes: Writes,
    away: Sequence[Away],
    keys: Sequence[str],
    *,
    truthful: bool = True,
) -> Ledger:
    """The ledger.

    Args:
        keys: the clients' keys, by client.
        truthful: verdicts can tell honest answers from cheating ones here; otherwise any word will do.
    """
    found = Ledger(asked=len(asked), outcomes=Counter(each.outcome for each in asked))
    log = {entry.number: entry for entry in served}
    recorded = {*writes.intents, *kept.intents, *kept.verdicts}
    told = {each.id for each in asked if each.id and not each.unrecorded}
    accepted = recorded | told
    ids, how = _matched(asked, kept, keys)
    found.sent, found.accepted, found.matched = len(log), len(accepted), Counter(how.values())
    for id in sorted(accepted):
        verdict = kept.verdicts.get(id)
        if verdict is None:
            found.lost.append(f"{id}: accepted, and there is no verdict")
            continue
        found.verdicts[str(verdict["verdict"])] += 1
        if verdict["verdict"] == "unverified":
            found.reasons[str(next(iter(verdict["reasons"]), ""))] += 1
    for each in asked:
        if not truthful and each.number in log:
            log[each.number] = replace(log[each.number], kind="")
        _one(found, each, ids.get(each.number, ""), log.get(each.number), kept, recorded, away)
    strangers = recorded - set(ids.values())
    found.wrong += [f"{id}: recorded, and nobody asked for it" for id in sorted(strangers)]
    _twice(found, kept, writes)
    return found


def _matched(asked: Sequence[Asked], kept: Kept, keys: Sequence[str]) -> tuple[dict[int, str], dict[int, str]]:
    """Id by marker, and how each was found."""
    ids = {each.number: each.id for each in asked if each.id}
    how = dict.fromkeys(ids, "header")
    for id, number in kept.markers.items():
        if number not in ids:
            ids[number], how[number] = id, "evidence"
    taken = set(ids.values())
    owners = [hash_key(key) for key in keys]
    left = [each for each in asked if each.number not in ids]
    documents = {**kept.verdicts, **kept.intents}
    for id, document in sorted(documents.items(), key=lambda item: float(item[1]["created"])):
        if id in taken:
            continue
        fitting = [each for each in left if _fits(each, document, owners)]
        if fitting:
            latest = max(fitting, key=lambda each: each.sent)
            left.remove(latest)
            ids[latest.number], how[latest.number] = id, "elimination"
    return ids, how


def _fits(each: Asked, document: Mapping[str, Any], owners: Sequence[str]) -> bool:
    same = owners[each.client] == document["owner"] and document["backend"] == each.backend
    form = document.get("stream", each.stream) == each.stream and document.get("mode", each.mode) == each.mode
    return same and form and each.sent <= float(document["created"])


def _one(
    found: Ledger,
    each: Asked,
    id: str,
    served: Served | None,
    kept: Kept,
    recorded: set[str],
    away: Sequence[Away],
) -> None:
    verdict = kept.verdicts.get(id, {})
    word, reasons = str(verdict.get("verdict", "")), verdict.get("reasons", [])
    reason = str(next(iter(reasons), "")) if word == "unverified" else ""
    kind = served.kind if served else ""
    row = each.line() | {"id": id, "kind": kind, "word": word, "reason": reason, "audited": verdict.get("audited")}
    found.rows.append(row)
    if each.unrecorded:
        # The proxy tells the store too, as soon as it is back, if it lives that long.
        found.told_unrecorded["and recorded later" if id in recorded else "and never recorded"] += 1
    if served is None:
        found.never_sent += 1
    elif id not in recorded and not each.unrecorded:
        if each.status == 0 and _was_away(each, away):
            found.undelivered += 1
        elif not id:
            found.lost.append(f"marker {each.number}: served by the backend, and nobody knows it")
    _check_word(found, each, kind, word, verdict)


def _was_away(each: Asked, away: Sequence[Away]) -> bool:
    return any(
        span.proxy == each.proxy and span.since <= each.sent + PROMPTLY and span.until >= each.sent for span in away
    )


def _check_word(found: Ledger, each: Asked, kind: str, word: str, verdict: Mapping[str, Any]) -> None:
    """Whether the verdict is one that this answer can get, and the one that the client was told."""
    if each.verdict not in ("", "pending", "unverified", word):
        found.wrong.append(f"{each.id}: the client was told {each.verdict}, the verdict is {word}")
    if kind == "honest" and word in ("reject", "withheld"):
        found.wrong.append(f"{each.id or each.number}: an honest answer, {word}: {verdict.get('reasons')}")
    if kind in ("hotter", "other_model"):
        found.cheats[f"{kind}: {word or 'none'}{', audited' if verdict.get('audited') else ''}"] += 1
        if word == "pass":
            found.wrong.append(f"{each.id or each.number}: a cheating answer passed")


def _twice(found: Ledger, kept: Kept, writes: Writes) -> None:
    for what, counts in (("verdicts", writes.verdicts), ("units", writes.units), ("outbox entries", writes.outbox)):
        found.duplicates += [f"{id}: {count} {what} written" for id, count in sorted(counts.items()) if count > 1]
    found.lost += [f"{id}: a verdict without a unit" for id in sorted(set(kept.verdicts) - set(writes.units))]
    found.lost += [f"{id}: a verdict that the outbox misses" for id in sorted(set(kept.verdicts) - set(kept.outbox))]
    found.lost += [f"{id}: has a verdict and is still waited for" for id in sorted({*kept.waiting} & {*kept.verdicts})]
    decided = Counter(str(verdict["backend"]) for verdict in kept.verdicts.values())
    for backend in sorted({*decided, *kept.counted}):
        counted = kept.counted.get(backend, 0)
        if counted > decided[backend]:
            found.duplicates.append(f"{backend}: {counted} units counted in its standing, {decided[backend]} verdicts")
    short = sum(decided.values()) - sum(kept.counted.values())
    if short > 0:
        found.lost.append(f"{short} units are in no record of standing ({kept.unfolded} wait, {kept.dropped} dropped)")
