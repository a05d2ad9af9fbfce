"""What pages name exists: settings, values, variables, flags, metrics, headers, paths, files, modules, links."""

from __future__ import annotations

import re

import pytest

from tests.docs import named, pages, shell

PAGES = pages.names()
_NAME = re.compile(r"(?:--)?[A-Za-z][A-Za-z0-9]*(?:[._-]+[A-Za-z0-9]+)+")
"""Words with a dot, a hyphen or an underscore in them: those are names of something."""
_SUFFIXES = (".yaml", ".json", ".pem", ".env", ".md", ".py", ".example", ".com", ".txt")


def names_of(page: str) -> set[str]:
    found = set()
    for span in pages.spans(page):
        plain = re.sub(r"(: .*|=.*|\(.*)$", "", span).rstrip("…. ")
        if _NAME.fullmatch(plain) and not plain.endswith(_SUFFIXES):
            found.add(plain)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str) -> None:
    assert sorted(name for name in names_of(page) if not named.exists(name, page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_metrics_exist(page: str) -> None:
    found = set(re.findall(r"\b(?:countersign|gen_ai)_[a-z0-9_]+[a-z0-9]\b", pages.text_of(page)))
    assert sorted(name for name in found if not named.is_metric(name)) == []


@pytest.mark.parametrize("page", PAGES)
def test_variables_exist(page: str) -> None:
    found = set(re.findall(r"\bCOUNTERSIGN_[A-Z0-9_]*[A-Z0-9]\b", pages.text_of(page)))
    assert sorted(name for name in found if not named.exists(name, page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_headers_and_paths_exist(page: str) -> None:
    text = pages.text_of(page)
    assert sorted(name for name in set(re.findall(r"\bx-countersign-[a-z]+\b", text)) if not _said(name)) == []
    paths = set(re.findall(r"(?<![\w.])(/v1/[a-z_/]+[a-z])", text))
    assert sorted(path for path in paths if not any(_said(part) for part in (path, path[3:]))) == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_are_understood(page: str) -> None:
    for span in pages.spans(page):
        if span.startswith("countersign ") and not set(span) & set("…{|["):
            for words in shell.commands(span):
                shell.check(words)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (pages.ROOT / page).parent
    for target in pages.links(page):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (folder / file).resolve() if file else pages.ROOT / page
        assert path.exists(), target
        if anchor:
            assert path.suffix == ".md", target
            assert anchor in pages.anchors(str(path.relative_to(pages.ROOT))), target


def test_every_page_is_in_the_index() -> None:
    shown = set(pages.links("docs/README.md"))
    assert {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} - shown == {"README.md"}
    assert "docs/README.md" in pages.links("README.md")


def _said(name: str) -> bool:
    return named.is_in_source(name) or f'"{name}' in named.source()
