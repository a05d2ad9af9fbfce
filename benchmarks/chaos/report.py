"""The result as a page and as lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmarks.chaos.fleet import ENGINE
from benchmarks.chaos.stage import Outcome, Scene

_LISTED = 20
_SEEN = """\
*Accepted* means that Redis acknowledged the intent, with `WAITAOF` where its file is synced always. What was served
while Redis was away was not accepted, and its client was told in the answer's head: `x-countersign-verdict: unverified`
and `x-countersign-reason: store_unavailable`. The proxy also tells Redis as soon as that is back, if it lives so long.
Requests, ids and verdicts come from witnesses of their own; how they are matched, and what counts as lost or doubled,
is told in `benchmarks/chaos/ledger.py`."""
_EVERYSEC = """\
With `appendfsync everysec`, and without `durability.aof`, an acknowledged intent may be in the kernel's memory only. It
survives the death of Redis, and not that of its machine: then up to a second of it is gone{how}.
That is what is listed as lost below, and as told to a client inline and forgotten. `appendfsync always` with
`durability.aof: true` loses nothing."""

_STRANGE = """\
The backend's answers are none of this engine's model, so it is not looked at what verdicts say, only that there is
exactly one."""
_HEADS = {
    "kinds": ("`kill -9`, or the network", "times"),
    "verdicts": ("verdict", "generations"),
    "reasons": ("unverified because", "generations"),
    "cheats": ("cheating answers", "generations"),
    "outcomes": ("as clients saw them", "requests"),
    "matched": ("matched to its id by", "requests"),
}


def text(outcome: Outcome, metadata: Mapping[str, Any]) -> str:
    """The ledger as a page."""
    ledger, scene = outcome.ledger, outcome.scene
    settled = f"{outcome.settled_after:.0f} s" if outcome.settled_after is not None else "not"
    how = " (here simulated by cutting\nits file back)" if scene.power else ""
    what = (
        "Chaos: who is missing when everything dies"
        if scene.kills
        else "Soak: who is missing, and what grows, when nothing dies"
    )
    struck = Counter({_named(kind, scene): count for kind, count in outcome.kinds.items()})
    lines = [
        f"# {what}",
        "",
        f"`{command(scene)}`, {metadata['started']}, {metadata['machine']['cpu']}, "
        f"{metadata['machine']['cores']} cores, commit {str(metadata['machine'].get('commit'))[:10]}.",
        "",
        f"{scene.proxies} proxies, {scene.workers} CPU workers, {scene.references} reference processes "
        f"{'with a real vLLM engine each' if scene.engine else 'and one reference server'} per model "
        f"({', '.join(scene.models)}), one Valkey with `appendfsync {scene.fsync}`; "
        f"{scene.clients} clients asking for {scene.seconds:.0f} s, streamed and whole, some leaving early; each "
        f"process behind relays of its own. All was settled {settled} after the last request (bound: "
        f"{scene.settle:.0f} s).",
        "",
        _SEEN,
        *(["", _EVERYSEC.format(how=how)] if scene.fsync == "everysec" else []),
        *(["", _STRANGE] if scene.engine else []),
        *(["", "## What was done", *_table("kinds", struck, total=True)] if scene.kills else []),
        "",
        "## Ledger",
        "",
        *_sums(outcome),
        *_table("verdicts", ledger.verdicts),
        *_table("reasons", ledger.reasons),
        *_table("cheats", ledger.cheats),
        *_table("outcomes", ledger.outcomes),
        *_table("matched", ledger.matched),
        "",
        *_memory(outcome),
    ]
    for title, entries in (("Lost", ledger.lost), ("Duplicates", ledger.duplicates), ("Wrong", ledger.wrong)):
        if entries:
            more = [f"- … and {len(entries) - _LISTED} more"] if len(entries) > _LISTED else []
            lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries[:_LISTED]), *more]
    if outcome.exits:
        lines += ["", "## Ended by itself", "", *(f"- {name}: codes {codes}" for name, codes in outcome.exits.items())]
    return "\n".join(lines) + "\n"


def command(scene: Scene) -> str:
    """The command line of a scene."""
    size = f"--proxies {scene.proxies} --workers {scene.workers} --references {scene.references}"
    time = f"--seconds {scene.seconds:g} --settle {scene.settle:g} --kills {scene.kills}"
    more = f"--clients {scene.clients} --seed {scene.seed} --fsync {scene.fsync}"
    power = " --power" if scene.power else ""
    power += f" --engine {Path(scene.engine).name}" if scene.engine else ""
    return f"countersign bench chaos {size} --models {' '.join(scene.models)} {time} {more}{power}"


def _sums(outcome: Outcome) -> list[str]:
    ledger = outcome.ledger
    rows = {
        "asked by clients": ledger.asked,
        "sent: in the backend's own log": ledger.sent,
        "accepted: intent kept by Redis, or id told to the client without a mark": ledger.accepted,
        "with a verdict": ledger.verdicts.total(),
        "served with the mark `store_unavailable`": ledger.told_unrecorded.total(),
        "… of these recorded when Redis was back": ledger.told_unrecorded["and recorded later"],
        "sent while Redis was away, no byte delivered, nothing recorded": ledger.undelivered,
        "asked, and never sent to the backend": ledger.never_sent,
        "**lost**": f"**{len(ledger.lost)}**",
        "**duplicates**": f"**{len(ledger.duplicates)}**",
        "wrong verdicts": len(ledger.wrong),
    }
    return ["| | generations |", "|---|---:|", *(f"| {name} | {count} |" for name, count in rows.items())]


def _table(what: str, counts: Counter[str], *, total: bool = False) -> list[str]:
    """After an empty line; nothing where nothing was counted."""
    if not counts:
        return []
    heads = _HEADS[what]
    rows = [f"| {name} | {count} |" for name, count in counts.most_common()]
    last = [f"| **all** | **{counts.total()}** |"] if total else []
    return ["", f"| {heads[0]} | {heads[1]} |", "|---|---:|", *rows, *last]


def _named(kind: str, scene: Scene) -> str:
    """What a kind of process is called: without real engines a scripted server stands for them."""
    return "reference server" if kind == ENGINE and not scene.engine else kind


def _memory(outcome: Outcome) -> list[str]:
    """Most memory of each kind of process; where nobody dies, also what it was after a third of the time."""
    most: dict[str, int] = {}
    third: dict[str, int] = {}
    for life, held in outcome.memory.items():
        kind = _named(re.split(r"[-.]", life)[0], outcome.scene)
        most[kind] = max(most.get(kind, 0), *held)
        third[kind] = max(third.get(kind, 0), held[len(held) // 3])
    if outcome.scene.kills:
        rows = [f"| {kind} | {held / 2**20:.0f} |" for kind, held in sorted(most.items())]
        return ["| process | most memory, MiB |", "|---|---:|", *rows]
    rows = [f"| {kind} | {third[kind] / 2**20:.0f} | {held / 2**20:.0f} |" for kind, held in sorted(most.items())]
    head = ["| process | memory after a third of the time, MiB | most |", "|---|---:|---:|"]
    return [*head, *rows, "", "Redis keeps every verdict for `verdict_ttl`, so that it grows with them."]


def prepare(output: Path) -> None:
    """Raise OSError where `write` could not write after all that time. What is there stays."""
    output.parent.mkdir(parents=True, exist_ok=True)
    for path in (_page_of(output), _lines_of(output)):
        path.open("ab").close()


def _page_of(output: Path) -> Path:
    return output.with_name(output.name + ".md")


def _lines_of(output: Path) -> Path:
    return output.with_name(output.name + ".jsonl")


def write(outcome: Outcome, metadata: Mapping[str, Any], output: Path) -> str:
    """Write `OUTPUT.md` and `OUTPUT.jsonl`; returns the page."""
    prepare(output)
    page = text(outcome, metadata)
    _page_of(output).write_text(page)
    head = {"metadata": dict(metadata), "exits": outcome.exits, "lives": outcome.lives, "redis": outcome.redis}
    began = min([blow.at for blow in outcome.blows] + [row["sent"] for row in outcome.ledger.rows], default=0.0)
    blows = [
        _compact({"blow": blow.kind, "at": blow.at - began, "victim": blow.victim, "seconds": blow.seconds})
        for blow in outcome.blows
    ]
    rows = [_row(row, began) for row in outcome.ledger.rows]
    with _lines_of(output).open("wb") as file:
        for line in (head, *blows, *rows):
            file.write(orjson.dumps(line) + b"\n")
    return page


def _row(row: Mapping[str, Any], began: float) -> dict[str, Any]:
    """A request: `at` in seconds from the beginning, `took` as its client saw it; what is empty is left out."""
    times = {"at": row["sent"] - began, "took": row["ended"] - row["sent"]}
    return _compact({"n": row["number"], **times} | {k: v for k, v in row.items() if k not in _TIMES})


_TIMES = ("number", "sent", "ended")


def _compact(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in row.items()
        if value is not None and value is not False and value != ""
    }
