"""What a PromQL expression asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

import promql_parser

GIVEN = frozenset({"namespace", "service", "pod", "le"})
"""Labels that a scrape adds, and a histogram's bounds."""

Values = Mapping[str, Set[str]]
"""Values that are exposed, by label."""


def parsed(query: str) -> Any:
    """The expression, with Grafana's variables replaced. Raises ValueError where Prometheus would refuse it."""
    return promql_parser.parse(query.replace("$__rate_interval", "5m"))


def selectors(query: str) -> dict[str, set[str]]:
    """Names of the metrics that an expression selects, with the labels that it selects or groups them by."""
    found: dict[str, set[str]] = {}
    for node, grouped in _selections(parsed(query), set()):
        found.setdefault(str(node.name), set()).update({each.name for each in node.matchers.matchers} | grouped)
    return found


def missing(query: str, exposed: Mapping[str, Values]) -> list[str]:
    """Metrics of an expression that are not exposed, labels that theirs do not have, and values that no label has.

    What is selected by not having a value is no mistake where nothing has it.
    """
    wrong = []
    for node, grouped in _selections(parsed(query), set()):
        name = str(node.name)
        if name not in exposed:
            wrong.append(name)
            continue
        known = exposed[name]
        wrong += [f"{name}{{{label}}}" for label in sorted(grouped - known.keys() - GIVEN)]
        for matcher in node.matchers.matchers:
            if matcher.name in GIVEN:
                continue
            if matcher.name not in known:
                wrong.append(f"{name}{{{matcher.name}}}")
            elif not all(_found(each, known[matcher.name]) for each in _wanted(matcher)):
                wrong.append(f"{name}{{{matcher.name}={matcher.value}}}")
    return wrong


def _wanted(matcher: Any) -> list[str]:
    """Patterns each of which a value should match."""
    match str(matcher.op):
        case "MatchOp.Equal":
            return [re.escape(matcher.value)]
        case "MatchOp.Re":
            return list(matcher.value.split("|"))
    return []


def _found(pattern: str, values: Set[str]) -> bool:
    return any(re.fullmatch(pattern, value) for value in values)


def _selections(node: Any, grouped: set[str]) -> list[tuple[Any, set[str]]]:
    """Selectors of an expression, with the labels that they are grouped by."""
    if isinstance(node, promql_parser.MatrixSelector):
        node = node.vector_selector
    if isinstance(node, promql_parser.VectorSelector):
        return [(node, grouped)]
    if isinstance(node, promql_parser.AggregateExpr):
        own = set(node.modifier.labels) if node.modifier is not None else set()
        return _selections(node.expr, grouped | own)
    if isinstance(node, promql_parser.BinaryExpr):
        return [found for side in (node.lhs, node.rhs) for found in _selections(side, grouped)]
    if isinstance(node, promql_parser.Call):
        return [found for argument in node.args for found in _selections(argument, grouped)]
    if isinstance(node, promql_parser.ParenExpr | promql_parser.SubqueryExpr | promql_parser.UnaryExpr):
        return _selections(node.expr, grouped)
    return []
