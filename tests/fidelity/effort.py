"""What an answer costs a gateway, as it grows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fidelity.gateway import Gateway

_TIMES = 4
_LINEAR = 2.0 * _TIMES
"""What is quadratic takes the square of `_TIMES`."""
_TRIES = 3


def assert_linear(gateway: Gateway, ask: Callable[[int], None], size: int) -> None:
    """An answer of four times the size costs about four times the computing. Where the gateway's process is not known
    both are asked for, and have to come.

    Args:
        ask: asks for an answer of a size.
        size: the smaller one; worth a tenth of a second.
    """
    ratios = []
    for _ in range(_TRIES):
        before = _ticks(gateway.pid)
        ask(size)
        between = _ticks(gateway.pid)
        ask(_TIMES * size)
        ratios.append((_ticks(gateway.pid) - between) / max(1, between - before))
        if ratios[-1] < _LINEAR:
            return
    raise AssertionError(f"{_TIMES} times the size takes {min(ratios):.1f} times the work")


def _ticks(pid: int | None) -> int:
    """What the kernel says a process has computed: user and system time, in ticks of its clock."""
    if pid is None:
        return 0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
