"""Consistent hashing with bounded loads: which backend requests of one key prefer, and when it has its share.

Every key ranks all backends by a hash of key and backend (Thaler and Ravishankar, "Using name-based mappings to
increase hit rates", 1998); the first that has not its share already takes the request (Mirrokni, Thorup and
Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018). Whoever leaves moves its own keys and no others,
evenly to the rest. Proxies agree without talking: nothing enters but names and keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.uint64]

_SHIFT = np.uint64(31), np.uint64(27), np.uint64(33)
_FACTOR = np.uint64(0x7FB5D329728EA185), np.uint64(0x81DADEF4BC2DD44D)


def hash_of(data: bytes) -> int:
    """64 bits that nobody can choose."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def points_of(names: Sequence[str]) -> Points:
    """One point (uint64) per backend, by its name alone."""
    return np.array([hash_of(name.encode()) for name in names], np.uint64)


def scores(points: Points, key: int) -> Points:
    """How much each backend is preferred by a key of 64 bits: independent, uniform in 64 bits."""
    mixed = points ^ np.uint64(key)
    mixed ^= mixed >> _SHIFT[0]
    mixed *= _FACTOR[0]
    mixed ^= mixed >> _SHIFT[1]
    mixed *= _FACTOR[1]
    mixed ^= mixed >> _SHIFT[2]
    return mixed


def share(requests: int, backends: int, bound: float) -> int:
    """How many of `requests` in flight one of `backends` may have at most: `bound` (≥ 1) times the mean, rounded up."""
    return math.ceil(bound * requests / backends)


def choose(points: Points, key: int, loads: Sequence[int], bound: float) -> int:
    """Position of the backend that takes one more request: the key's first that stays within its share by it.

    There is always one: were all at the bound, there would be more requests than there are.
    """
    most = share(sum(loads) + 1, len(loads), bound)
    preferred = scores(points, key)
    best = int(preferred.argmax())
    if loads[best] < most:
        return best
    return next(int(at) for at in preferred.argsort()[::-1] if loads[at] < most)
