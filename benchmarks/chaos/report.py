"""The result as text and as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmarks.chaos.stage import Outcome


def text(outcome: Outcome, metadata: Mapping[str, Any]) -> str:
    """The ledger as a page."""
    ledger, scene = outcome.ledger, outcome.scene
    settled = f"{outcome.settled_after:.0f} s" if outcome.settled_after is not None else "not settled"
    lines = [
        "# Chaos: who is missing when everything dies",
        "",
        f"`countersign bench chaos --kills {scene.kills} --seconds {scene.seconds:g} --fsync {scene.fsync} "
        f"--seed {scene.seed}`, {metadata['started']}, {metadata['machine']['cpu']}, "
        f"{metadata['machine']['cores']} cores.",
        "",
        f"{scene.proxies} proxies, {scene.workers} CPU workers, {scene.references} reference processes and one "
        f"reference server per model ({', '.join(scene.models)}), one Valkey with `appendfsync {scene.fsync}`; "
        f"{scene.clients} clients asking for {scene.seconds:.0f} s; every process behind relays of its own. "
        f"All was settled {settled} after the last request (bound: {scene.settle:.0f} s).",
        "",
        "## What was done",
        "",
        *_table(("blow", "times"), outcome.kinds, total=True),
        "",
        "## Ledger",
        "",
        "| | generations |",
        "|---|---:|",
        f"| asked by clients | {ledger.asked} |",
        f"| sent: in the backend's own log | {ledger.sent} |",
        f"| accepted: intent kept by Redis, or id told to the client without a mark | {ledger.accepted} |",
        f"| with a verdict | {ledger.verdicts.total()} |",
        f"| served with the mark `store_unavailable` | {ledger.told_unrecorded.total()} |",
        f"| … of these recorded when Redis was back | {ledger.told_unrecorded['and recorded later']} |",
        f"| sent while Redis was away, nothing delivered, nothing recorded | {ledger.undelivered} |",
        f"| asked, and never sent to the backend | {ledger.never_sent} |",
        f"| **lost** | **{len(ledger.lost)}** |",
        f"| **duplicates** | **{len(ledger.duplicates)}** |",
        f"| wrong verdicts | {len(ledger.wrong)} |",
        "",
        *_table(("verdict", "generations"), ledger.verdicts),
        "",
        *_table(("unverified because", "generations"), ledger.reasons),
        "",
        *_table(("cheating answers", "generations"), ledger.cheats),
        "",
        *_table(("as clients saw them", "requests"), ledger.outcomes),
        "",
        *_table(("matched to its id by", "requests"), ledger.matched),
    ]
    for title, entries in (("Lost", ledger.lost), ("Duplicates", ledger.duplicates), ("Wrong", ledger.wrong)):
        if entries:
            lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries[:50])]
    return "\n".join(lines) + "\n"


def _table(heads: tuple[str, str], counts: Counter[str], *, total: bool = False) -> list[str]:
    rows = [f"| {name} | {count} |" for name, count in counts.most_common()]
    last = [f"| **all** | **{counts.total()}** |"] if total else []
    return [f"| {heads[0]} | {heads[1]} |", "|---|---:|", *rows, *last]


def write(outcome: Outcome, metadata: Mapping[str, Any], output: Path) -> str:
    """Write `OUTPUT.md` and `OUTPUT.jsonl`; returns the page."""
    output.parent.mkdir(parents=True, exist_ok=True)
    page = text(outcome, metadata)
    output.with_suffix(".md").write_text(page)
    head = {"metadata": dict(metadata), "exits": outcome.exits, "lives": outcome.lives, "redis": outcome.redis}
    blows = [{"blow": blow.kind, "at": round(blow.at, 3), "victim": blow.victim} for blow in outcome.blows]
    rows = [_compact(row) for row in outcome.ledger.rows]
    with output.with_suffix(".jsonl").open("wb") as file:
        for line in (head, *blows, *rows):
            file.write(orjson.dumps(line) + b"\n")
    return page


def _compact(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in row.items()
        if value not in ("", None, False)
    }
