"""How much the recorder holds, so that no backend's answers crowd out another's evidence."""

from __future__ import annotations

import random
import threading
from collections import Counter

from policies import audit


class Room:
    """Room for `max_items` responses and `max_bytes` of what their taps hold; any thread may ask.

    Beyond half of it, what is let in is left to chance within each backend's share (`policies.audit.admits`).
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items, self._max_bytes = max_items, max_bytes
        self._items: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Whoever could foresee it would cheat while nobody looks.
        self._chance = random.SystemRandom()

    def take(self, backend: str, size: int) -> bool:
        """Take a place for a response of `size` bytes if there is one."""
        with self._lock:
            items, held = self._items.total(), self._bytes.total()
            backends = len({*self._items, backend})
            fits = (
                items < self._max_items
                and held + size <= self._max_bytes
                and audit.admits(self._items[backend], items, backends, self._max_items, self._chance.random())
                and audit.admits(self._bytes[backend], held, backends, self._max_bytes, self._chance.random())
            )
            if fits:
                self._items[backend] += 1
                self._bytes[backend] += size
            return fits

    def leave(self, backend: str, size: int) -> None:
        """Give it back."""
        with self._lock:
            self._items[backend] -= 1
            self._bytes[backend] -= size
            if not self._items[backend]:
                del self._items[backend], self._bytes[backend]
