"""`benchmarks.harness.machine`, where it was before."""

from benchmarks.harness.machine import describe, is_busy, load

__all__ = ["describe", "is_busy", "load"]
