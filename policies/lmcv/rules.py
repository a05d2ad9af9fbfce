"""LMCV's acceptance rules as data, each with a name, a version and the K its numbers were measured at.

Sources: the 8B and 27B parameter reports and the coded preset of TrueOpen/lmcv-experiments (2026). None states an
error rate it controls: the bounds were read off the very samples they are scored on (four verifier runs over the same
200 answers for 8B). At greedy decoding and at most 128 tokens they reject 0.75 % (8B) and 9.66 % (27B) of honest
single answers. Bounds at another K do not carry over, because Jaccard and Jensen–Shannon change with K.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

JUDGMENT_FUNCTION_VERSION = "PREFILL_GENERATED_TOKEN_METRICS_V1"
TOKEN_SCOPE = "ALL_GENERATED_OUTPUT_TOKENS"

Comparison = Literal["==", "<=", ">=", ">", "<"]

_COMPARE: Mapping[Comparison, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "<=": operator.le,
    ">=": operator.ge,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class Bound:
    """One metric against one threshold. Never holds for a value that is not a finite number."""

    metric: str
    op: Comparison
    threshold: float

    def holds(self, value: float) -> bool:
        """Whether the value meets the bound."""
        return abs(value) != float("inf") and _COMPARE[self.op](value, self.threshold)


@dataclass(frozen=True, slots=True)
class Branch:
    """A reject of several bounds together: every clause must hold, and a clause holds when any of its bounds does."""

    name: str
    clauses: tuple[tuple[Bound, ...], ...]

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metrics are in the branch."""
        return all(any(b.holds(metrics.get(b.metric, float("nan"))) for b in clause) for clause in self.clauses)


@dataclass(frozen=True, slots=True)
class BatchRule:
    """What is asked of a batch: its tokens pooled, and how its samples fared one by one."""

    accept: tuple[Bound, ...]
    reject: tuple[Bound, ...]
    samples: int
    tokens: int
    pass_rate: float
    reject_rate: float


@dataclass(frozen=True, slots=True)
class Policy:
    """One named rule.

    Attributes:
        name, version: what a result is filed under.
        k: alternatives per position on both sides when the thresholds were measured.
        accept, reject: bounds of one sample, in the order they are reported; all of the former pass it, any of the
            latter rejects it.
        branches: further rejects.
        tokens: output tokens a sample needs; fewer are inconclusive.
        finite: positions with a finite difference a sample needs.
        pass_word: what a passing sample is called.
        batch: the rule over samples together, if there is one.
    """

    name: str
    version: str
    k: int
    accept: tuple[Bound, ...]
    reject: tuple[Bound, ...]
    branches: tuple[Branch, ...] = ()
    tokens: int = 0
    finite: int = 1
    pass_word: str = "PASS"
    batch: BatchRule | None = None


MEAN = "mean_abs_logprob_diff"
P50, P90, P95, P99 = (f"abs_logprob_diff_p{level}" for level in (50, 90, 95, 99))
RANK = "rank_delta_nonzero_rate"
JACCARD = "topk_jaccard_mean"
JS99 = "union_js_p99"
MISSING = "missing_selected_count"

SAMPLE_METRICS = (MEAN, P95, P99, RANK, JACCARD, JS99)
"""In the order LMCV reports failures."""


def bounds(values: Mapping[str, float], *, reject: bool = False, missing: float = 0.0) -> tuple[Bound, ...]:
    """Upper bounds of every metric, lower ones of Jaccard (either kind), after the count of missing rows."""
    upper: Comparison = ">" if reject else "<="
    lower: Comparison = "<" if reject else ">="
    first = Bound(MISSING, ">", missing) if reject else Bound(MISSING, "==" if missing == 0 else "<=", missing)
    ordered = sorted(values, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    return (first, *(Bound(name, lower if "jaccard" in name else upper, values[name]) for name in ordered))


_ORDER = (P50, MEAN, P90, P95, P99, RANK, JACCARD, "topk_jaccard_p05", "union_js_p95", JS99)


def _six(*values: float) -> dict[str, float]:
    return dict(zip(SAMPLE_METRICS, values, strict=True))


QWEN3_8B_REPORT = Policy(
    name="qwen3-8b-bf16-report",
    version="1",
    k=32,
    accept=bounds(_six(0.018, 0.100, 0.200, 0.025, 0.935, 0.012)),
    reject=bounds(_six(0.023, 0.130, 0.280, 0.040, 0.910, 0.025), reject=True),
    finite=6,
)

QWEN3_8B_PRESET = Policy(
    name="qwen3-8b-bf16-4090-v1",
    version="1",
    k=32,
    accept=bounds(_six(0.020, 0.120, 0.250, 0.030, 0.920, 0.020)),
    reject=bounds(_six(0.030, 0.200, 0.500, 0.060, 0.880, 0.060), reject=True),
    tokens=64,
    pass_word="PASS_PROVISIONAL",
    batch=BatchRule(
        accept=bounds(
            _six(0.015, 0.090, 0.200, 0.012, 0.940, 0.012)
            | {P50: 0.0001, P90: 0.060, "topk_jaccard_p05": 0.820, "union_js_p95": 0.004}
        ),
        reject=bounds(_six(0.020, 0.120, 0.250, 0.030, 0.920, 0.020), reject=True),
        samples=4,
        tokens=512,
        pass_rate=0.90,
        reject_rate=0.02,
    ),
)

_UNLIKE = (Bound(JACCARD, "<", 0.870),)

QWEN38_27B_REPORT = Policy(
    name="qwen3.8-27b-fp8-report",
    version="1",
    k=20,
    accept=bounds(_six(0.080, 0.220, 0.550, 0.047, 0.865, 0.100)),
    reject=bounds(_six(3.240, 13.337, 16.663, 0.500, 0.650, 0.635), reject=True),
    branches=(
        Branch(
            "awq_a",
            (
                _UNLIKE,
                (Bound(JS99, "<=", 0.100),),
                (Bound(P99, ">", 0.200),),
                (Bound(P99, "<=", 0.320), Bound(JACCARD, ">", 0.780)),
            ),
        ),
        Branch(
            "awq_b", (_UNLIKE, (Bound(JS99, ">", 0.100),), (Bound(JACCARD, "<=", 0.800),), (Bound(P95, "<=", 1.630),))
        ),
        Branch(
            "awq_c", (_UNLIKE, (Bound(JS99, ">", 0.100),), (Bound(JACCARD, ">", 0.800),), (Bound(JS99, "<=", 0.160),))
        ),
    ),
    finite=6,
)

POLICIES: Mapping[str, Policy] = {
    policy.name: policy for policy in (QWEN3_8B_REPORT, QWEN3_8B_PRESET, QWEN38_27B_REPORT)
}
