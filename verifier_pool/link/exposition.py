"""Metrics as Prometheus reads them: text format 0.0.4."""

from __future__ import annotations

import hmac
import math
import re
from collections.abc import Iterable, Sequence

from pydantic import SecretStr

from verifier_pool.link.meters import Family, Spread, Values

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ODD = re.compile(r"[^a-zA-Z0-9_]")
_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


def metric_name(name: str, unit: str, kind: str) -> str:
    """The name that OpenTelemetry's rules give a metric in Prometheus: with its unit, and `_total` for a counter. Units
    in braces, such as `{token}`, and 1 add nothing."""
    plain = _ODD.sub("_", name) + _SUFFIXES.get(unit, "")
    return plain + "_total" if kind == "counter" else plain


def label_name(name: str) -> str:
    """The name of a label in Prometheus."""
    return _ODD.sub("_", name)


def page(families: Iterable[Family]) -> bytes:
    """The page. Families without a value are left out; labels are in alphabetical order, empty ones left out."""
    lines: list[str] = []
    for family in families:
        if family.points:
            _write(lines, family)
    return ("\n".join(lines) + "\n").encode() if lines else b""


def bears(authorization: str | None, token: SecretStr | None) -> bool:
    """Whether a request's `authorization` is this token's."""
    if authorization is None or token is None:
        return False
    scheme, _, given = authorization.partition(" ")
    known = token.get_secret_value().encode()
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), known)


def _write(lines: list[str], family: Family) -> None:
    name = metric_name(family.name, family.unit, family.kind)
    lines.append(f"# HELP {name} {_help(family.help)}")
    lines.append(f"# TYPE {name} {family.kind}")
    order = sorted(range(len(family.labels)), key=lambda at: family.labels[at])
    names = [label_name(family.labels[at]) for at in order]
    bounds = [*map(_number, family.bounds), "+Inf"]
    for values, point in family.points.items():
        told = _labels(names, order, values)
        if not isinstance(point, Spread):
            lines.append(f"{name}{{{told}}} {_number(point)}" if told else f"{name} {_number(point)}")
            continue
        comma, total = "," if told else "", 0
        for bound, count in zip(bounds, point.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{told}{comma}le="{bound}"}} {_number(total)}')
        braced = f"{{{told}}}" if told else ""
        lines.append(f"{name}_count{braced} {_number(total)}")
        lines.append(f"{name}_sum{braced} {_number(point.sum)}")


def _labels(names: Sequence[str], order: Sequence[int], values: Values) -> str:
    return ",".join(f'{name}="{_value(values[at])}"' for name, at in zip(names, order, strict=True) if values[at])


def _value(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
