"""The page and the text of a bundle: what they show, and that nothing in a bundle can do more than be shown."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from policies import bundle, jws, receipt
from policies.evidence import Ids, Replay
from policies.examination import examine
from policies.judging import Grounds
from policies.report import CSP, page
from policies.report.escape import characters, escaped, visible
from policies.report.style import STYLE
from policies.report.text import as_lines
from tests.policies.test_examination import DECLARED, TRUSTED, audited, profile
from tests.support.bundles import KEY, Made, made, placed

HOSTILE = "</bdi><script>alert(1)</script><img src=x onerror=alert(2)>\"' style=x:y \x1b[2J\u202e\u2066\u200b\x00\x85"
VOID = {"meta", "circle", "line", "tr", "td", "th"}
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "div", "bdi", "b", "code", "pre"),
    *("table", "tr", "td", "th", "details", "summary", "section", "svg", "circle", "line", "text"),
}
ATTRIBUTES = {
    *("lang", "dir", "charset", "name", "content", "http-equiv", "class", "title", "role", "aria-label", "viewbox"),
    *("x", "y", "cx", "cy", "r", "x1", "x2", "y1", "y2"),
}


class Reading(HTMLParser):
    """Every tag and attribute of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.titles: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.titles += [value or "" for name, value in attrs if name == "title"]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


class Speaking:
    """A tokenizer whose every token is the same hostile text."""

    def __init__(self, piece: bytes) -> None:
        self._piece = piece

    added: Mapping[int, str] = {2: "<|end|>"}
    special_ids: frozenset[int] = frozenset({2})

    def decode(self, ids: Ids, *, skip_special_tokens: bool) -> str:
        return (self._piece * len(ids)).decode("utf-8", "replace")

    def steps(self, ids: Ids, *, context: Ids, skip_special_tokens: bool) -> list[str] | None:
        return [self._piece.decode("utf-8", "replace")] * len(ids)

    def encode(self, text: str) -> Ids:
        return np.zeros(0, np.int32)

    def pieces(self, ids: Ids) -> Sequence[bytes] | None:
        return [self._piece] * len(ids)


def saying(piece: bytes, text: str) -> Made:
    first = audited("fp8", 0)
    evidence = replace(first.choices[0], text=text, backend=text, model=text, request=text.encode("utf-8", "replace"))
    (replay,) = first.grounds.replays or ()
    assert isinstance(replay, Replay)
    return made([evidence], Grounds(DECLARED, Speaking(piece), profile(), [replay], earlier=[None]))


def harmless(text: str) -> Reading:
    """Nothing that runs, loads, or reorders."""
    found = Reading(text)
    assert found.tags <= TAGS
    assert found.attributes <= ATTRIBUTES
    shown = "".join([*found.text, *found.titles])
    assert all(char.isprintable() or char in "\n\t" for char in shown), sorted(set(shown))
    return found


def test_hostile_tokens_are_shown_and_nothing_else() -> None:
    text = page(examine(saying(HOSTILE.encode(), HOSTILE).bytes, TRUSTED)).decode()
    found = harmless(text)
    shown = "".join(found.text)
    assert "<script>alert(1)</script>" in shown
    assert "⟨U+202E⟩" in shown
    assert "⟨U+001B⟩" in shown
    assert text.count("<script") == 0
    for line in as_lines("\u202e" + HOSTILE, examine(saying(HOSTILE.encode(), HOSTILE).bytes)):
        assert line.isprintable()


@given(st.binary(max_size=12), st.text(max_size=30))
def test_no_token_becomes_markup(piece: bytes, text: str) -> None:
    clean = text.encode("utf-8", "replace").decode()
    data = saying(piece, clean).bytes
    harmless(page(examine(data, TRUSTED)).decode())
    assert all(line.isprintable() for line in as_lines("x", examine(data)))


def test_only_its_own_style_is_allowed() -> None:
    text = page(examine(audited().bytes, TRUSTED)).decode()
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style == STYLE
    assert f"'sha256-{base64.b64encode(sha256(style.encode()).digest()).decode()}'" in CSP
    assert CSP.startswith("default-src 'none'; ")
    assert escaped(CSP) in text
    assert "url(" not in style
    assert not re.search(r"https?://", text)


def test_it_says_what_it_shows() -> None:
    honest, rejected = (page(examine(each.bytes, TRUSTED)).decode() for each in (audited(), audited("fp8", 1)))
    assert re.search(r'<h1 class="good">Passed: ', honest)
    assert re.search(r'<h1 class="bad">Rejected: ', rejected)
    assert honest.count('<bdi class="s4') <= 1 + honest.count('class="s4">over')
    assert rejected.count('<bdi class="s4') > 5
    assert "this answer: " in honest
    assert "replayed −" in "".join(Reading(rejected).titles)
    for text in (honest, rejected):
        harmless(text)


def test_what_does_not_hold_comes_first() -> None:
    lied = page(examine(audited().saying(verdict="reject", reasons=["x: y"]).bytes, TRUSTED)).decode()
    assert '<h1 class="bad">This does not show its verdict' in lied
    assert "What it says all the same: Rejected" in Reading(lied).text[-1] + "".join(Reading(lied).text)
    harmless(page(examine(b"junk")).decode())


ODD: list[dict[str, Any]] = [
    {
        "checks": [
            1,
            "x",
            None,
            {},
            {"name": 3, "metrics": [1]},
            {"name": "distance", "metrics": {"score": "x", "p": -1}},
        ]
    },
    {"reasons": [None, 3, {"x": 1}], "verdict": HOSTILE, "created": "x", "decided": 1e300},
    {"choices": [None, {"index": "0"}, {"index": 0, "checks": 7}], "backend": ["x"], "model": None},
    {"checks": [{"name": "distance", "result": HOSTILE, "reason": HOSTILE, "level": -1e300, "metrics": {HOSTILE: 1}}]},
]


@pytest.mark.parametrize("says", ODD)
def test_whatever_was_signed_can_be_shown(says: dict[str, Any]) -> None:
    for data in (audited().saying(**says).bytes, made(audited().choices).saying(**says).bytes):
        found = examine(data, TRUSTED)
        assert found.receipt is not None
        harmless(page(found).decode())
        assert all(line.isprintable() for line in as_lines("x", found))


@given(st.text(max_size=40), st.integers(1, 3))
def test_characters_of_several_tokens(text: str, size: int) -> None:
    raw = text.encode("utf-8", "replace")
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    assert "".join(characters(pieces)) == raw.decode()
    assert len(characters(pieces)) == len(pieces)


@given(st.text())
def test_everything_can_be_seen(text: str) -> None:
    assert visible(text).isprintable()


@pytest.mark.parametrize("missing", range(4))
def test_what_a_tokenizer_was_not_asked_leaves_a_page(missing: int) -> None:
    """Whoever signs a case may leave answers of its tokenizer out."""
    first = audited()
    one = first.choices[0]
    evidence = replace(one, text="ab" * len(one.output_ids), sampling=replace(one.sampling, bad_words=("x", "y")))
    whole = made([evidence], replace(first.grounds, spelling=Speaking(b"ab")))
    raw = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(whole.bundle.case))
    raw["said"][missing] = {}
    case = zstandard.ZstdCompressor(write_checksum=True).compress(msgspec.msgpack.encode(raw))
    said = {**whole.statement, "sha256": {**whole.statement["sha256"], "replay": sha256(case).hexdigest()}}
    token = jws.sign(receipt.encode(said), KEY, receipt.KIND)
    members = msgspec.structs.replace(whole.bundle, receipt=token, log=placed(token), case=case)
    found = examine(bundle.pack(members), TRUSTED)
    assert (found.grounds is None) == (found.derived is None)
    harmless(page(found).decode())
    assert as_lines("a", found)


@pytest.mark.parametrize("char", "\u3164\u115f\u2800\u034f\ufe0f\U000e0100\u17b4\u180b\uffa0\u200d\u00ad\u202e\x1b")
def test_what_cannot_be_seen_is_spelt(char: str) -> None:
    assert visible(f"a{char}b") == f"a⟨U+{ord(char):04X}⟩b"
    assert visible("Zürich 東京 😀 é ") == "Zürich 東京 😀 é "
