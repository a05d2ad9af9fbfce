"""What a PromQL expression asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import promql_parser

GIVEN = frozenset({"namespace", "service", "pod", "le"})
"""Labels that a scrape adds, and a histogram's bounds."""


def parsed(query: str) -> Any:
    """The expression, with Grafana's variables replaced. Raises ValueError where Prometheus would refuse it."""
    return promql_parser.parse(query.replace("$__rate_interval", "5m"))


def selectors(query: str) -> dict[str, set[str]]:
    """Names of the metrics that an expression selects, with the labels that it selects or groups them by."""
    found: dict[str, set[str]] = {}
    _collect(parsed(query), set(), found)
    return found


def _collect(node: Any, grouped: set[str], found: dict[str, set[str]]) -> None:
    if isinstance(node, promql_parser.MatrixSelector):
        node = node.vector_selector
    if isinstance(node, promql_parser.VectorSelector):
        labels = {matcher.name for matcher in node.matchers.matchers}
        found.setdefault(str(node.name), set()).update(labels | grouped)
    elif isinstance(node, promql_parser.AggregateExpr):
        own = set(node.modifier.labels) if node.modifier is not None else set()
        _collect(node.expr, grouped | own, found)
    elif isinstance(node, promql_parser.BinaryExpr):
        for side in (node.lhs, node.rhs):
            _collect(side, grouped, found)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            _collect(argument, grouped, found)
    elif isinstance(node, promql_parser.ParenExpr | promql_parser.SubqueryExpr | promql_parser.UnaryExpr):
        _collect(node.expr, grouped, found)


def missing(query: str, exposed: Mapping[str, set[str]]) -> list[str]:
    """Metrics of an expression that are not exposed, and labels that theirs do not have."""
    wrong = []
    for name, labels in selectors(query).items():
        if name == "up":  # Prometheus' own
            labels = set()
        elif name not in exposed:
            wrong.append(name)
            continue
        wrong += [f"{name}{{{label}}}" for label in labels - exposed.get(name, set()) - GIVEN]
    return wrong
