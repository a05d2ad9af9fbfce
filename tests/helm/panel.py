"""What the rows of the dashboard are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One graph: its queries with a legend each. OURS in a query stands for the selection made at the top."""

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False
    signed: bool = False


def quantiles(histogram: str, *levels: float, by: str = "") -> tuple[tuple[str, str], ...]:
    """Queries for quantiles of a histogram of seconds, of one for each value of a label."""
    grouped, legend = (f"{by}, le", f"{{{{{by}}}}} ") if by else ("le", "")
    rate = f"sum by ({grouped}) (rate({histogram}_bucket{{OURS}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({level}, {rate})", f"{legend}p{100 * level:g}") for level in levels)


def everywhere(counter: str, by: str, among: str = "") -> str:
    """Rate of a counter that Redis holds, and every proxy tells alike."""
    return f"sum by ({by}) (max by ({among or by}) (rate({counter}[$__rate_interval])))"
