"""Profiles fitted from made-up honest answers, for tests that need some profile and not a particular one."""

from __future__ import annotations

import numpy as np

from policies.profile import Profile, ProfileKey, Row, fit

KEY = ProfileKey(model="m", runtime="vllm-0.32-v1-cpu", precision="bf16", reference="toy 1")


def profile(key: ProfileKey = KEY, answers: int = 12) -> Profile:
    """One cell of the distance check: sampled answers of 64 tokens."""
    scores = 0.05 * np.random.default_rng(7).lognormal(0, 0.1, answers)
    rows = [
        Row("distance", "full", "single", 0.7, 64, float(score), f"r{index}", 64) for index, score in enumerate(scores)
    ]
    return fit(rows, key, created=1.0)
