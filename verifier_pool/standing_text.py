"""A backend's standing in words, tables and a chart, from `policies.standing.summary`. Pure text for a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies import standing
from policies.audit import ALARM, CALM
from policies.coverage import BACKEND, OURS, REQUEST
from policies.settings import Settings
from policies.unit import CLIENT_SEED, EARLIER_LIFE, KEY_SHARE, REPEATED
from verifier_pool.terminal import chart, number, plain, table, wrap

Summary = Mapping[str, Any]

MEANINGS = {
    standing.TRIAL: "It is served from, and not trusted yet.",
    standing.TRUSTED: "Nothing speaks against it.",
    standing.SUSPECT: "It is asked last, but for a small share of turns.",
    standing.QUARANTINED: "No client is sent to it until you pardon it, or release it where it was held by hand.",
}
BLAMES = {BACKEND: "the backend", OURS: "ours", REQUEST: "the request"}
OUTSIDE = {
    CLIENT_SEED: "the client set the seed",
    REPEATED: "counted before",
    KEY_SHARE: "its client key had its share of the day",
    EARLIER_LIFE: "served before the pardon that began this life",
}
UNDECLARED = "no longer in the settings"
UNHEARD = "none of its answers has been counted"
NOTHING = "-"
MOST_KEYS = 8
"""Client keys listed one by one."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What is known of one backend.

    Attributes:
        summary: of the record under its present declaration, or of an empty one; without a declaration, the last.
        declared: the settings name it. `recorded`: there is such a record.
        earlier: summaries of its records under other declarations.
        waiting, dropped, unchecked: units not counted yet; lost for it; dropped because the second reference failed.
    """

    summary: Summary
    declared: bool = True
    recorded: bool = True
    earlier: Sequence[Summary] = ()
    waiting: int = 0
    dropped: int = 0
    unchecked: int = 0


def line_per_backend(backends: Sequence[Shown], width: int, now: float) -> list[str]:
    """A table with one line per backend, `width` columns wide; `now` (Unix seconds) shortens today's times."""
    head = ("BACKEND", "STATE", "SINCE", "EVIDENCE", "COVERAGE", "AUDIT", "UNITS", "REASON")
    rows = [head, *(_line(shown, now) for shown in backends)]
    return table(rows, width, right=(4, 5, 6), spare=(6, 5, 2, 4), indent="")


def page(shown: Shown, settings: Settings, width: int) -> list[str]:
    """Everything about one backend, on lines of `width` columns."""
    parts = [
        _state(shown, width),
        _evidence(shown.summary, settings, width),
        _units(shown, settings, width),
        _coverage(shown.summary, width),
        _accusing(shown.summary, width),
        _earlier(shown.earlier, width),
        _trail(shown.summary, width),
    ]
    return [line for part in parts if part for line in ["", *part]][1:]


def percent(share: float | None) -> str:
    """A share, cut and not rounded, so that 100 % is all of it and 0 % nothing."""
    if share is None or not math.isfinite(share):
        return NOTHING
    if 0 < share < 0.001:
        return "<0.1 %"
    return f"{math.floor(share * 1000 + 1e-9) / 10:g} %"


def moment(at: float | None) -> str:
    """A Unix second in UTC, to the minute."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) if at is not None else NOTHING
    except (OverflowError, ValueError, OSError):
        return NOTHING


def _line(shown: Shown, now: float) -> tuple[str, ...]:
    summary, evidence = shown.summary, shown.summary["evidence"]
    since = moment(summary["since"] if shown.recorded else None)
    today = since[:10] == moment(now)[:10]
    return (
        plain(summary["backend"]),
        plain(summary["state"]),
        since[11:] if today else since[:10],
        f"{number(evidence['log10'])} of {number(evidence['needed_log10'])}",
        percent(summary["coverage"]["ratio"]),
        percent(summary["audit_rate"]),
        f"{summary['units']['counted']:,}",
        plain(next(iter(_reasons(shown)), NOTHING)),
    )


def _reasons(shown: Shown) -> list[str]:
    reasons = [*shown.summary["reasons"]] if shown.recorded else [UNHEARD]
    return reasons if shown.declared else [UNDECLARED, *reasons]


def _state(shown: Shown, width: int) -> list[str]:
    summary = shown.summary
    since = f" since {moment(summary['since'])} UTC" if shown.recorded else ""
    life = f", in its life {summary['life']}" if summary["life"] > 1 else ""
    meaning = MEANINGS.get(summary["state"], "") if shown.declared else ""
    lines = wrap(f"{plain(summary['backend'])}: {plain(summary['state'])}{since}{life}. {meaning}", width, "  ")
    for reason in _reasons(shown):
        lines += wrap(f"- {plain(reason)}", width, "  ")
    said = ", ".join(f"{plain(name)} {plain(text)}" for name, text in summary["declaration"].items() if text)
    return lines + wrap(f"Declared: {said or 'nothing'}", width, "  ")


def _evidence(summary: Summary, settings: Settings, width: int) -> list[str]:
    evidence = summary["evidence"]
    needed = evidence["needed_log10"]
    found = f"Evidence {number(evidence['log10'])}; {number(needed)} (1/alpha, of this life) accuses"
    return [
        *wrap(found, width, "  "),
        *chart(summary["chart"], needed, width),
        *wrap(_level(summary), width, "  "),
        *wrap(_audits(summary, settings), width, "  "),
    ]


def _level(summary: Summary) -> str:
    evidence, life, accused = summary["evidence"], summary["life"], summary["evidence"]["accused"]
    if accused is not None and accused["basis"] == "exact":
        delta = " (exact checks suffice, so that no calibration error is added)"
    else:
        whence = "the errors of the calibrations" if evidence["delta"] else "no calibrated check took part"
        delta = f" + delta {_small(evidence['delta'])} ({whence})"
    bound = f"Level {_small(evidence['level'])} = alpha {_small(evidence['alpha'])}{delta}"
    meaning = "an honest backend is ever accused with at most that probability, however often one looks"
    return f"{bound}: {meaning}. Life {life} has 1/{life * (life + 1)} of alpha, {_small(evidence['budget'])}."


def _audits(summary: Summary, settings: Settings) -> str:
    raises, all_of_it = (number(level / math.log(10)) for level in (CALM, ALARM))
    suspicion, rate = number(summary["suspicion_log10"]), percent(summary["audit_rate"])
    if settings.audit.rate is not None:
        return f"Suspicion {suspicion}. Audit rate {rate}, fixed by the setting audit.rate."
    meaning = f"from {raises} on it raises the audit rate, {all_of_it} audits everything"
    return f"Suspicion {suspicion} ({meaning}). Audit rate {rate}."


def _units(shown: Shown, settings: Settings, width: int) -> list[str]:
    units, keys, rules = shown.summary["units"], shown.summary["keys"], settings.standing
    lines = wrap(
        f"Units {units['counted']:,} counted, {units['withheld']:,} of them with evidence missing", width, "  "
    )
    for code, count in units["outside"].items():
        lines += wrap(f"- {count:,} outside the evidence: {OUTSIDE.get(code, plain(code))}", width, "  ")
    for count, what in (
        (shown.waiting, "wait for a worker to count them"),
        (shown.dropped, "were lost: too many waited, or they could not be read"),
        (shown.unchecked, "lost their replayed checks, because the second reference could not repeat the replay"),
    ):
        lines += wrap(f"- {count:,} {what}", width, "  ") if count else []
    if keys["today"]:
        day = time.strftime("%Y-%m-%d", time.gmtime(keys["day"] * 86400))
        cap = f"each counts for {rules.key_allowance:,} units a day, and ever more rarely then"
        lines += wrap(f"Client keys that spoke on {day}: {len(keys['today']):,}; {cap}", width, "  ")
        most = sorted(keys["today"].items(), key=lambda item: (-item[1], item[0]))
        rows = [(plain(key), f"{count:,}") for key, count in most[:MOST_KEYS]]
        if len(most) > MOST_KEYS:
            rows.append((f"{len(most) - MOST_KEYS:,} more", f"{sum(count for _, count in most[MOST_KEYS:]):,}"))
        lines += table([("key (hashed)", "units"), *rows], width, right=(1,))
    return lines


def _coverage(summary: Summary, width: int) -> list[str]:
    found = summary["coverage"]
    if not found["generations"]:
        return wrap("Coverage: nothing served yet", width)
    tokens = f"{found['decided']:,} of {found['served']:,} output tokens decided"
    answers = (
        f"{found['generations']:,} answers, {found['audited']:,} audited, {found['replayed']:,} judged by a replay"
    )
    lines = wrap(f"Coverage {percent(found['ratio'])}: {tokens} ({answers})", width, "  ")
    if found["recent"] is not None:
        lines += wrap(f"Recently {percent(found['recent'])} of what requests and we let be decided", width, "  ")
    rows = [
        (
            plain(code),
            f"{left['generations']:,}",
            f"{left['tokens']:,}",
            BLAMES.get(left["blame"], plain(left["blame"])),
        )
        for code, left in found["by_reason"].items()
    ]
    head = ("not decided for", "answers", "tokens", "whose doing")
    return lines + (table([head, *rows], width, right=(1, 2)) if rows else [])


def _accusing(summary: Summary, width: int) -> list[str]:
    rows = [(plain(row["id"]), moment(row["at"]), plain(", ".join(row["processes"]))) for row in summary["accusing"]]
    if not rows:
        return []
    return [
        *wrap("Last answers that speak against it", width),
        *table([("id", "when (UTC)", "checks"), *rows], width, spare=(1,)),
    ]


def _earlier(records: Sequence[Summary], width: int) -> list[str]:
    if not records:
        return []
    rows = [
        (
            str(record["life"]),
            plain(record["state"]),
            moment(record["since"]),
            number(record["evidence"]["log10"]),
            f"{record['units']['counted']:,}",
            plain(", ".join(text for text in record["declaration"].values() if text)),
        )
        for record in records
    ]
    head = ("life", "state", "since (UTC)", "evidence", "units", "declared")
    return [*wrap("Records under other declarations", width), *table([head, *rows], width, right=(0, 4))]


def _trail(summary: Summary, width: int) -> list[str]:
    lines = wrap("Audit trail (UTC)", width) if summary["trail"] else []
    for entry in summary["trail"]:
        states = f"{entry['before']} to {entry['after']}" if entry["before"] != entry["after"] else entry["after"]
        said = f"{moment(entry['at'])} {plain(entry['by'])}: {plain(entry['action'])}, {plain(states)}"
        lines += wrap(f"{said}: {plain(entry['why'])}" if entry["why"] else said, width, "  ")
    return lines


def _small(value: float) -> str:
    return number(math.log10(value) if value > 0 else None)
