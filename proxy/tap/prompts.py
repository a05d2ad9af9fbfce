"""The ids of the prompts, which a backend says once for all choices, or with each."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
from msgspec import Raw

from policies.evidence import Ids
from proxy.tap.choice import ChoiceRecord
from proxy.tap.rawjson import UNREADABLE

_ids = msgspec.json.Decoder(list[int])


class Prompts:
    """What came of them; `most` tokens in all. Whatever reads returns the fault there is, or None.

    Attributes:
        tokens: how many are held.
    """

    def __init__(self, most: int) -> None:
        self.tokens = 0
        self._most = most
        self._all: Ids | None = None
        self._known: dict[int, Ids] = {}

    def read(self, value: Raw | None) -> str | None:
        """Those of every choice; the first to come count."""
        if self._all is not None or value is None:
            return None
        self._all, fault = self._decoded(value, None)
        return fault

    def read_of(self, record: ChoiceRecord, value: Raw | None) -> str | None:
        """Those of a choice; the first to come count."""
        if record.prompt_ids is not None or value is None:
            return None
        record.prompt_ids, fault = self._decoded(value, self._known.get(record.prompt))
        if record.prompt_ids is not None:
            self._known.setdefault(record.prompt, record.prompt_ids)
        return fault

    def of(self, record: ChoiceRecord | None, prompt: int) -> Ids | None:
        """Those of a choice, or of another one of the same prompt."""
        if self._all is not None:
            return self._all
        own = None if record is None else record.prompt_ids
        return self._known.get(prompt) if own is None else own

    def _decoded(self, value: Raw, known: Ids | None) -> tuple[Ids | None, str | None]:
        """The ids, and a fault instead; the same array where they are the `known` ones, so that many choices hold one
        prompt once."""
        if bytes(value).count(b",") >= self._most:
            return None, "too_large"
        try:
            found = array("i", _ids.decode(value))
        except (*UNREADABLE, TypeError):
            return None, "bad_ids"
        if found and min(found) < 0:
            return None, "bad_ids"
        ids = np.array(found, np.int32)
        if known is not None and np.array_equal(ids, known):
            return known, None
        self.tokens += len(ids)
        return (None, "too_large") if self.tokens > self._most else (ids, None)
