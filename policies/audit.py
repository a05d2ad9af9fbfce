"""Which generations are replayed: a secret choice that nobody can foresee or steer.

The choice depends on a secret and our own random id, never on the answer, so a backend that knows
everything else still cannot tell an audited generation from another. The rate follows the backend's past alone.
"""

from __future__ import annotations

import hashlib
import hmac
import math

LEARN = 100
"""Decided generations of a record that are all audited before the rate falls."""
ALARM = math.log(1000)
"""Suspicion, as `eprocess.log_suspicion`, at which everything is audited again. At any given unit of the first
thousand an honest backend is that suspect with probability at most 1/1000."""
CALM = math.log(10)
"""Suspicion up to which it does not raise the rate."""

_SPAN = 2**64


def chosen(secret: bytes, id: str, rate: float) -> bool:
    """Whether the generation `id` is audited at `rate`.

    HMAC-SHA256 of the id under the secret, its first eight bytes read as a fraction of 2⁶⁴, lies below
    `rate`. Deterministic: the same secret and id are chosen at every rate above that fraction. A rate of 0
    (or anything that is not a number above 0) chooses nothing, 1 and more choose everything.
    """
    if not rate > 0:
        return False
    if rate >= 1:
        return True
    digest = hmac.new(secret, id.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()
    return int.from_bytes(digest[:8], "big") < rate * _SPAN


def wants_full(secret: bytes, id: str, share: float) -> bool:
    """Whether an audit of `id` also takes the reference's own top 20: a draw of its own, at `share`.

    Independent of `chosen`, which hashes the bare id: a backend that learns which generations are audited still does
    not learn in which of them an omitted rival shows.
    """
    return chosen(secret, f"full/{id}", share)


def rate(decided: int, log_suspicion: float, floor: float) -> float:
    """Share of a backend's next generations to audit, in [floor, 1].

    Everything until `LEARN` generations were decided, then LEARN/decided, so that the number of audits grows with the
    logarithm of the traffic; never under `floor`. Suspicion raises it, linearly in its logarithm, from
    `CALM` to `ALARM`. Depends on the past alone.

    Args:
        decided: generations of this record that could be decided (`policies.coverage`): a backend that leaves its
            answers undecidable is not audited less for it.
        log_suspicion: as `eprocess.log_suspicion` has it, minus infinity without evidence.
    """
    learnt = LEARN / max(decided, LEARN)
    alarmed = (log_suspicion - CALM) / (ALARM - CALM)
    return min(1.0, max(floor, learnt, alarmed))


def admits(waiting: int, total: int, backends: int, limit: int, draw: float) -> bool:
    """Whether one more generation may queue for verification while the workers are behind.

    The queue's `limit` is divided evenly among the backends that have anything waiting, so that none crowds out
    another's evidence. Everything is admitted while less than half the queue is filled, or less than half of the
    backend's share. From there the chance falls evenly to nothing at its full share: which of its answers go unchecked
    is left to `draw`, and to nothing that a backend or a client could steer by.

    Args:
        waiting: generations of this backend in the queue. total: of all.
        backends: how many have any waiting, this one included.
        draw: uniform in [0, 1), unpredictable.
    """
    share = limit / max(backends, 1)
    if total >= 2 * limit:
        return False
    if 2 * total < limit or 2 * waiting < share:
        return True
    return draw < 2 * (1 - waiting / share)
