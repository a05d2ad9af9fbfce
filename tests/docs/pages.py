"""README.md, SECURITY.md and docs/*.md as the tests read them: blocks by language, links, headings, names in code."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^ *```(\S*)[^\n]*\n(.*?)^ *```[ ]*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: the page it is on, the line its text begins at, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """For names of tests."""
        return f"{self.page}:{self.line}"


def names() -> list[str]:
    """Every page, by its path from the root."""
    return ["README.md", "SECURITY.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@cache
def text_of(page: str) -> str:
    """A page's text."""
    return (ROOT / page).read_text(encoding="utf-8")


def prose_of(page: str) -> str:
    """The same without its blocks."""
    return _FENCE.sub("", text_of(page))


def blocks(page: str) -> list[Block]:
    """Its fenced blocks, in order."""
    text = text_of(page)
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[1], textwrap.dedent(found[2]))
        for found in _FENCE.finditer(text)
    ]


def every_block(*languages: str) -> list[Block]:
    """Blocks of these languages on all pages."""
    return [block for page in names() for block in blocks(page) if block.language in languages]


def spans(page: str) -> set[str]:
    """What stands in backquotes outside of blocks."""
    return set(_SPAN.findall(prose_of(page)))


def links(page: str) -> list[str]:
    """Targets of links outside of blocks and code."""
    return _LINK.findall(_SPAN.sub("", prose_of(page)))


def anchors(page: str) -> set[str]:
    """What a heading is reached by, as GitHub makes it: lower case, no punctuation, hyphens for spaces."""
    found: dict[str, int] = {}
    made = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        seen = found.get(anchor, 0)
        found[anchor] = seen + 1
        made.add(f"{anchor}-{seen}" if seen else anchor)
    return made
