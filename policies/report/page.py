"""The page: what the bundle comes to, the answer token by token, the checks beside honest answers, what was signed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.evidence import Evidence, Replay
from policies.examination import Examination, Outcome
from policies.judging import Grounds
from policies.profile import Cell
from policies.report import nulls, tokens
from policies.report.escape import cut, escaped, lines
from policies.report.reading import readable
from policies.report.style import CSP, STYLE
from policies.report.words import NUMBERS, headline, moment, number, outcome_words, sentence, trust

MOST_TEXT = 200_000
"""Characters of a request or a text that are shown."""
MOST_CHOICES = 16
_KINDS = {"pass": "good", "unaudited": "good", "reject": "bad", "withheld": "bad"}
_NOTHING = Grounds()


def page(found: Examination) -> bytes:
    """The page of an examination. Never raises for what a bundle holds."""
    body = [_head(found), *_answers(found), _proof(found), _statement(found), *_asked(found)]
    title = "Evidence" if found.receipt is None else f"{found.receipt.verdict}: {found.receipt.id}"
    return lines(
        [
            "<!doctype html>",
            '<html lang="en" dir="ltr">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="content-security-policy" content="{escaped(CSP)}">',
            '<meta name="viewport" content="width=device-width">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{escaped(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>",
            "",
        ]
    ).encode()


def _head(found: Examination) -> str:
    known = found.receipt
    sound = found.outcome is Outcome.VERIFIED
    kind = "bad" if not sound or known is None else _KINDS.get(known.verdict, "open")
    first = [f'<h1 class="{kind}">{escaped(cut(headline(found), 400))}</h1>']
    first += [f"<p>{escaped(each.words)}</p>" for each in found.faults]
    if not sound and known is not None:
        first.append(f"<p>What it says all the same: {escaped(sentence(readable(known.verification)))}</p>")
    return lines(first)


def _answers(found: Examination) -> list[str]:
    """Each choice, under the checks as they were derived again here; as they were signed where that failed."""
    signed = None if found.receipt is None else found.receipt.verification
    if not found.choices or (found.derived is None and signed is None):
        return []
    said = readable(found.derived or signed or {})
    grounds = found.grounds or _NOTHING
    several = {choice["index"]: choice for choice in said["choices"] if isinstance(choice["index"], int)}
    parts = []
    for at, choice in enumerate(found.choices[:MOST_CHOICES]):
        own = several.get(choice.index, said)
        replay = None if grounds.replays is None else grounds.replays[at]
        title = "The answer" if len(found.choices) == 1 else f"Choice {choice.index}: {own['verdict']}"
        known = replay if isinstance(replay, Replay) else None
        parts.append(_answer(title, choice, known, grounds, own["checks"]))
    if len(found.choices) > MOST_CHOICES:
        parts.append(f"<p class=note>{len(found.choices) - MOST_CHOICES} more choices are not shown.</p>")
    return parts


def _answer(
    title: str, choice: Evidence, replay: Replay | None, grounds: Grounds, checks: Sequence[Mapping[str, Any]]
) -> str:
    cells = {check["name"]: nulls.cells_of(grounds.profile, check, choice, replay) for check in checks}
    honest = cells.get("distance")
    usual = max(cell.scores[-1] for cell in honest) if honest else None
    shown = tokens.rows(choice, replay, grounds, usual)
    return lines(
        [
            f"<h2>{escaped(title)}</h2>",
            _legend(replay is not None, usual),
            tokens.answer(shown, len(choice.output_ids)),
            tokens.worst(shown),
            "<h2>The checks</h2>",
            _checks(checks),
            *(_numbers(check, cells[check["name"]]) for check in checks),
        ]
    )


def _legend(replayed: bool, usual: float | None) -> str:
    if not replayed:
        return "<p class=note>The answer was not replayed, so no token is shaded. Hover over one for its claim.</p>"
    honest = f"what honest answers reach ({number(usual)} nats)"
    base = honest if usual else f"{tokens.USUAL:g} nats (nothing was calibrated)"
    shades = "".join(f'<bdi class="s{at + 1}">over {edge:g}×</bdi>' for at, edge in enumerate(tokens.EDGES))
    words = f"Shaded by how far claim and replay differ, in multiples of {base}; "
    return (
        f'<p class="note legend">{shades} {escaped(words)}<bdi class="lost">wavy</bdi> where another token wins '
        "by over 0.2 nats under the reference. Hover for the numbers.</p>"
    )


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td><b>{escaped(check['name'])}</b><td class={_class(check['result'])}>{escaped(check['result'])}"
        f"<td>{escaped(cut(outcome_words(check), 2000))}</tr>"
        for check in checks
    ]
    return lines(['<table class="words">', "<tr><th>check<th>result<th>in words</tr>", *rows, "</table>"])


def _class(result: object) -> str:
    return str(result) if result in ("pass", "reject", "withheld") else "inconclusive"


def _numbers(check: Mapping[str, Any], cells: Sequence[Cell]) -> str:
    metrics = check["metrics"]
    rows = [
        f"<tr><td>{escaped(name)}<td>{number(metrics[name])}<td>{escaped(words)}</tr>"
        for name, words in NUMBERS.items()
        if metrics.get(name) is not None
    ]
    drawn = []
    if cells:
        drawn = [f"<p>{escaped(nulls.words(check, cells))}</p>", nulls.drawing(cells, float(metrics["score"]))]
    if not rows:
        return ""
    table = ["<details><summary>the numbers</summary>", "<table class=numbers>", *rows, "</table>", "</details>"]
    return lines(["<section>", f"<h3>{escaped(check['name'])}</h3>", *drawn, *table, "</section>"])


def _proof(found: Examination) -> str:
    rows = [
        f"<tr><td>{escaped(each.about)}<td class={'holds' if each.fault is None else 'fails'}>"
        f"{'holds' if each.fault is None else 'fails'}<td>{escaped(each.words)}</tr>"
        for each in found.findings
    ]
    table = ['<table class="words findings">', "<tr><th>about<th>it<th>in words</tr>", *rows, "</table>"]
    return lines(["<h2>What was checked of the file</h2>", *table, f"<p class=note>{escaped(trust(found))}</p>"])


def _statement(found: Examination) -> str:
    if found.receipt is None:
        return ""
    said, verification = found.receipt.statement, readable(found.receipt.verification)
    facts = {
        "verification": said["id"],
        "asked": moment(verification["created"]),
        "decided": moment(verification["decided"]),
        "signed": moment(said["issued"]),
        **{f"declared {name}": value for name, value in said["declared"].items() if value},
        **{f"SHA-256 of {name}": value for name, value in said["sha256"].items() if value},
        "signing key": found.receipt.kid,
    }
    rows = [f"<tr><td>{escaped(name)}<td><code>{escaped(cut(str(value)))}</code></tr>" for name, value in facts.items()]
    return lines(["<h2>What was signed</h2>", "<table class=facts>", *rows, "</table>"])


def _asked(found: Examination) -> list[str]:
    """Request and text as they travelled, folded away."""
    if not found.choices:
        return []
    first = found.choices[0]
    bodies = [("The request, as it came", first.asked), ("The request, as it was sent on", first.request)]
    parts = [(title, body.decode("utf-8", "replace")) for title, body in bodies if body]
    for choice in found.choices[:MOST_CHOICES]:
        which = "" if len(found.choices) == 1 else f" of choice {choice.index}"
        parts += [(f"{name}{which}, as the client was shown it", text) for name, text in _texts(choice) if text]
    return [
        f"<details><summary>{escaped(title)}</summary><pre>{escaped(cut(text, MOST_TEXT), chr(10))}</pre></details>"
        for title, text in parts
    ]


def _texts(choice: Evidence) -> list[tuple[str, str]]:
    calls = "\n".join(f"{name}({arguments})" for name, arguments in choice.tool_calls)
    return [("Reasoning", choice.reasoning), ("The answer", choice.text), ("Tool calls", calls)]
