"""What pages say beyond their blocks: the threat model has every cheat, a signature is checked as it is made."""

from __future__ import annotations

import re
import time
from typing import Any

from benchmarks.adversary.registry import ATTACKS
from policies.settings import AuditSettings, Settings, VerificationSettings
from policies.signature import sign
from proxy.api.routes import LONGEST_WAIT
from tests.docs import drawn, named, pages, shell
from tests.docs.test_blocks import SHELL

THREATS = pages.text_of("docs/threat-model.md")
SDK = pages.text_of("docs/sdk.md")


def rows() -> list[list[str]]:
    """Cells of the table of attacks."""
    table = THREATS.partition("| attack | played by |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_every_cheat_is_in_the_threat_model() -> None:
    named = [name for row in rows() for name in re.findall(r"`([a-z0-9-]+)`", row[1])]
    cheats = {name for name in ATTACKS if not name.startswith("honest")}
    assert set(named) == cheats
    assert f"plays {_WORDS[len(cheats)]} cheats, and {_WORDS[len(ATTACKS) - len(cheats)]} honest" in _flat("README.md")


_WORDS = {6: "six", 40: "forty"}


def _flat(page: str) -> str:
    return " ".join(pages.text_of(page).split())


def test_every_attack_says_who_catches_it_and_what_is_left() -> None:
    assert len(rows()) > 30
    for row in rows():
        assert len(row) == 5, row
        assert row[2], row
        assert row[3] or row[2].startswith("nobody"), row
        assert row[4], row


def test_nobody_is_said_to_catch_what_is_out_of_reach() -> None:
    """What no check of ours can tell is listed all the same, and so are cheats that are kinds of others."""
    left_open = {row[0] for row in rows() if row[2].startswith("nobody")}
    assert left_open == {"forwarding to another honest server", "verifiers that collude, or lie"}
    attacks = " ".join(row[0] for row in rows())
    for word in ("watermark", "advertising", "backdoors", "collude", "copies", "hardware fault", "cached", "KV cache"):
        assert word in attacks, word


def test_counts_in_the_threat_model_are_those_measured() -> None:
    measured = (pages.ROOT / "benchmarks" / "results" / "detection.md").read_text()
    arms = re.findall(r"^\| ([\w ,-]+?) \| (\d+) \| (\d+) \|", measured.partition("## Cheats, H200")[2], re.MULTILINE)
    known = {f"{rejected} of {answers}" for _, answers, rejected in arms}
    known |= {f"{hits} of {all}" for hits, all in re.findall(r"\| (\d+)/(\d+) \(", measured)}
    for row in rows():
        for count in re.findall(r"\d+ of \d+", row[3].replace("none of 200", "")):
            assert count in known, row
    for hits, answers in re.findall(r"(\d+) and (\d+) of \d+", THREATS):
        assert hits != answers
    honest = re.findall(r"^\| [\w-]+ \| (\d+) \| \d+ \| \d+ \| 0 \|", measured, re.MULTILINE)
    assert f"none of {sum(map(int, honest)):,} answers rejected" in _flat("docs/threat-model.md")


def test_a_receiver_checks_signatures_as_they_are_made() -> None:
    scope: dict[str, Any] = {"time": time}
    (block,) = [block for block in pages.blocks("docs/sdk.md") if "def is_genuine" in block.text]
    exec(block.text, scope)
    secret, body, now = "whsec_" + "c2VjcmV0" * 5, b'{"type": "verification.rejected"}', int(time.time())

    def headers(at: int) -> dict[str, str]:
        signed = sign(f"{secret} whsec_{'b3RoZXIh' * 5}", "msg_1", at, body)
        return {"webhook-id": "msg_1", "webhook-timestamp": str(at), "webhook-signature": signed}

    assert scope["is_genuine"](secret, headers(now), body)
    assert not scope["is_genuine"](secret, headers(now), body + b" ")
    assert not scope["is_genuine"](secret, headers(now - 301), body)


def test_defaults_are_as_the_pages_say() -> None:
    rules, audits = VerificationSettings(), AuditSettings()
    assert f"up to\n{LONGEST_WAIT:.0f};" in SDK
    assert f"`verification.inline_wait` ({rules.inline_wait:.0f} s)" in SDK
    assert "`verdict_ttl` later (a week)" in SDK
    assert rules.verdict_ttl == 7 * 86_400
    assert rules.evidence_ttl == 3600
    assert "`verification.evidence_ttl`, an hour" in pages.text_of("docs/security.md")
    assert (audits.full, audits.floor) == (0.25, 0.05)
    assert "which `audit.full` gives to a quarter" in pages.text_of("docs/verdicts.md")


def test_commits_that_are_cited_are_those_of_the_results() -> None:
    cited = re.findall(
        r"\]\(\.\./(benchmarks/results/\S+?)\),\s+commit ([0-9a-f]{7,})", pages.text_of("docs/capacity.md")
    )
    assert len(cited) >= 2
    for path, commit in cited:
        folder = (pages.ROOT / path).parent
        told = [file.read_text() for file in (folder / "metadata.json", pages.ROOT / path) if file.exists()]
        assert any(commit in text for text in told), path


def test_the_tables_of_exceptions_hold_nothing_that_no_page_needs() -> None:
    commands = [words for block in pages.every_block(*SHELL) for words in shell.commands(block.text)]
    unused = {head for head in shell.NOT_RUN if not any(tuple(words[: len(head)]) == head for words in commands)}
    text = "\n".join(map(pages.text_of, pages.names()))
    unused |= {(name,) for name in named.ELSEWHERE if name not in text}
    unused |= {(begins,) for begins in drawn.DRAWN if not _drawn(begins)}
    assert unused == set()


def _drawn(begins: str) -> bool:
    return any(block.text.startswith(begins) for block in pages.every_block("text"))


def test_every_section_of_the_settings_is_on_the_page_of_settings() -> None:
    page = pages.text_of("docs/settings.md")
    assert [name for name in Settings.model_fields if not re.search(rf"`[^`]*\b{name}\b", page)] == []
