"""docs/telemetry.md has every span and every attribute, and names no other."""

from __future__ import annotations

import re
from pathlib import Path

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.attributes.messaging_attributes import MESSAGING_DESTINATION_NAME
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.http_attributes import HTTP_REQUEST_METHOD, HTTP_RESPONSE_STATUS_CODE
from opentelemetry.semconv.attributes.server_attributes import SERVER_ADDRESS, SERVER_PORT
from opentelemetry.semconv.attributes.url_attributes import URL_PATH

from verifier_pool.link.telemetry import names

PAGE = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
ALL = {attribute for attributes in names.ATTRIBUTES.values() for attribute in attributes}


def rows(heading: str) -> list[list[str]]:
    """Cells of the table whose first column is called so."""
    table = PAGE.split(f"\n| {heading} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_span_is_on_the_page() -> None:
    assert [name for row in rows("span") for name in named(row[0])] == [*_in_order()]


def _in_order() -> list[str]:
    return sorted(names.ATTRIBUTES, key=[name for row in rows("span") for name in named(row[0])].index)


def test_every_attribute_is_on_the_page() -> None:
    told = [name for row in rows("attribute") for name in named(row[0])]
    assert len(told) == len(set(told))
    assert set(told) == ALL


def test_the_page_says_which_spans_have_it() -> None:
    for attributes, spans, _ in rows("attribute"):
        only = set(named(spans))
        if only and "and others" not in spans:
            for attribute in named(attributes):
                having = {name for name, given in names.ATTRIBUTES.items() if attribute in given}
                assert having <= only, attribute


def test_names_that_are_not_ours_are_opentelemetrys() -> None:
    gen_ai = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    others = {HTTP_REQUEST_METHOD, HTTP_RESPONSE_STATUS_CODE, URL_PATH, SERVER_ADDRESS, SERVER_PORT, ERROR_TYPE}
    foreign = {name for name in ALL if not name.startswith("countersign.")}
    assert foreign <= {value for value in gen_ai if isinstance(value, str)} | others | {MESSAGING_DESTINATION_NAME}
    # Those that hold content are never used.
    assert not {name for name in ALL if any(word in name for word in ("messages", "prompt", "completion", "instruct"))}
