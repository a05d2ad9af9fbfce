"""Hypothesis without deadlines: the machine may be busy, and timings are tested where they matter."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
