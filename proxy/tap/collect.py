"""Evidence of one response, gathered field by field as frames pass."""

from __future__ import annotations

import logging
from array import array
from typing import Any

import msgspec
from msgspec import Raw

from policies.evidence import Evidence, Ids, Usage
from policies.message import MAX_CALLS, ODD, Shown, place_of
from proxy.tap import billed
from proxy.tap.allowed import Allowed
from proxy.tap.bill import believed
from proxy.tap.choice import ChoiceRecord, short
from proxy.tap.claim import WIDTH
from proxy.tap.compose import compose
from proxy.tap.experts import MAX_BYTES
from proxy.tap.guarded import UNREADABLE_FAULT
from proxy.tap.outline import is_wider, size_of
from proxy.tap.prompts import Prompts
from proxy.tap.rawjson import NULL, UNREADABLE, Object, is_null, read_object, read_objects
from proxy.tap.shown import shown
from proxy.tap.together import Chunk, Part, as_one, read_together
from proxy.tap.types import Prepared

logger = logging.getLogger(__name__)

_CHARACTERS_PER_TOKEN = 4
_MOST_UNCOUNTED = 32 * 1024
"""Bytes of choices that are read without being counted first."""
_SPARE_CHOICES = 256
_TOGETHER = 8
"""Choices of a stream's chunks that are read together."""
_MOST_LATE, _MOST_LATE_BYTES = 64, 64 * 1024
_LARGE_CHUNK = 16 * 1024
_RESPONSE = ("prompt_token_ids", "usage")

_ids = msgspec.json.Decoder(list[int])
_string = msgspec.json.Decoder(str)
_integer = msgspec.json.Decoder(int)
_reason = msgspec.json.Decoder(int | str)


class Collector:
    """Evidence of one response. Reads what the backend sends and never raises on it.

    The choices of a stream's chunks are read some time later, several together (`later`, `settle`): a client waits for
    none of that. Whoever asks what was collected has it read first.
    """

    def __init__(self, prepared: Prepared, allowed: Allowed) -> None:
        self.prepared = prepared
        self.allowed = allowed
        self._records: dict[int, ChoiceRecord] = {}
        self._late: list[Object] = []
        self._alike: list[tuple[bytes, Chunk]] = []
        self._alike_of = 0
        self._late_tops: list[Object] = []
        self._late_bytes = 0
        self.faults: dict[str, None] = {}
        self.terminal = False
        self._usage: billed.Billed | None = None
        self._tokens = 0
        self._rows = 0
        self._characters = self._calls = 0
        self._prompts = Prompts(allowed.prompt_tokens)
        self._experts = 0
        self.expected = prepared.prompts * prepared.n

    @property
    def held(self) -> int:
        """Bytes that what is kept takes, roughly."""
        rows = self._rows * 2 * WIDTH * 4
        kept = rows + 4 * (self._tokens + self._prompts.tokens + self._characters) + self._experts
        return kept + self._late_bytes

    @property
    def choices(self) -> dict[int, ChoiceRecord]:
        """What arrived of each choice, by its index."""
        self.catch_up()
        return self._records

    def fault(self, code: str) -> None:
        """Remembers what the backend withheld or broke."""
        self.faults[code] = None

    def too_many(self, top: Object) -> bool:
        """Whether a large response, or chunk, has many more choices than were asked for."""
        choices = top.get("choices")
        if choices is None or size_of(choices) <= _MOST_UNCOUNTED:
            return False
        return is_wider(bytes(choices), 1, self.expected + _SPARE_CHOICES)

    def unreadable(self) -> None:
        """What was read last broke its reader."""
        if UNREADABLE_FAULT not in self.faults:
            logger.exception("an answer cannot be read")
        self.fault(UNREADABLE_FAULT)

    def response(self, top: Object) -> None:
        """Reads the fields of a whole response or of a stream's chunk."""
        try:
            self._response(top)
        except Exception:
            self.unreadable()

    def _response(self, top: Object) -> None:
        prompt = top.get("prompt_token_ids")
        if not is_null(prompt) and (fault := self._prompts.read(prompt)):
            self.fault(fault)
        usage = top.get("usage")
        if usage is not None and not is_null(usage):
            self._usage = billed.read(usage)

    def apart(self, choices: list[Object]) -> None:
        """Whether these of one object are choices of their own: some clients take the first of an index for all of it,
        and some add them up."""
        if len(choices) > 1 and len({self._place(fields.get("index")) for fields in choices}) < len(choices):
            self.fault(ODD)

    def choice(self, fields: Object, *, whole: bool) -> None:
        """Reads one choice of an answer in one piece (`whole`), or of a stream."""
        try:
            self._choice(fields, shown(fields, place_of(self.prepared.endpoint, whole=whole)))
        except Exception:
            self.unreadable()

    def _choice(self, fields: Object, said: Shown) -> None:
        record = self._record(fields.get("index"))
        if record is None:
            return
        self._show(record, said)
        expected = self._read_ids(record, fields.get("token_ids"))
        if self.prepared.ids_as_tokens:
            self._read_claim(record, fields.get("logprobs"), expected)
        self._read_rest(record, fields)

    def response_later(self, top: Object, size: int) -> None:
        """Reads the fields of a stream's chunk of `size` bytes, now or later."""
        kept = {name: top[name] for name in _RESPONSE if name in top and not is_null(top[name])}
        if kept:
            self._late_tops.append(kept)
            self._late_bytes += size
            if self._late_bytes > _MOST_LATE_BYTES:
                self.catch_up()

    def later(self, fields: Object, size: int) -> None:
        """Reads one choice of a chunk of `size` bytes, now or later; `fields` may be changed meanwhile."""
        if size > _LARGE_CHUNK:
            self.catch_up()
            self.choice(fields, whole=False)
            return
        if self._alike:
            self.catch_up()
        self._late.append(dict(fields))
        self._late_bytes += size
        if len(self._late) >= _MOST_LATE or self._late_bytes > _MOST_LATE_BYTES:
            self.catch_up()

    def alike(self, index: int, event: bytes, chunk: Chunk) -> None:
        """Takes, now or later, a chunk of one choice that was read already, and has nothing else in it."""
        if self._late or self._alike_of != index:
            self.catch_up()
            self._alike_of = index
        self._alike.append((event, chunk))
        self._late_bytes += len(event)
        if len(self._alike) >= _MOST_LATE or self._late_bytes > _MOST_LATE_BYTES:
            self.catch_up()

    def settle(self) -> None:
        """Reads what is to be read, where it is enough to be read together."""
        if len(self._late) >= _TOGETHER or len(self._alike) >= _TOGETHER:
            self.catch_up()

    def catch_up(self) -> None:
        """Reads what is to be read."""
        tops, late = self._late_tops, self._late
        if self._alike:
            self._catch_up_alike()
        if not tops and not late:
            return
        self._late_tops, self._late, self._late_bytes = [], [], 0
        for top in tops:
            self.response(top)
        if not late:
            return
        parts = read_together(self.prepared.endpoint, late) if len(late) > 1 else None
        if parts is None or not self._fit(parts):
            for fields in late:
                self.choice(fields, whole=False)
            return
        try:
            for fields, part in zip(late, parts, strict=True):
                self._take(fields, part)
        except Exception:
            self.unreadable()

    def _catch_up_alike(self) -> None:
        alike, self._alike = self._alike, []
        self._late_bytes = 0
        part = as_one([chunk for _, chunk in alike])
        if part is not None and self._fit([part]):
            try:
                self._take_of(self._record_at(self._alike_of), part)
            except Exception:
                self.unreadable()
            return
        for event, _ in alike:
            top = read_object(event.removeprefix(b"data: ")) or {}
            for fields in read_objects(top.get("choices", NULL)) or ():
                self.choice(fields, whole=False)

    def _fit(self, parts: list[Part]) -> bool:
        """Whether none of them comes near what an answer may have."""
        ids = sum(len(part.ids) for part in parts if part.ids is not None)
        rows = sum(max(len(part.claim.counts), len(part.ids or ())) for part in parts if part.claim is not None)
        return max(self._tokens, self._rows) + max(ids, rows) <= self.allowed.tokens

    def _take(self, fields: Object, part: Part) -> None:
        """As `choice`, for what was read already."""
        record = self._record(fields.get("index"))
        if record is not None:
            self._take_of(record, part)
            self._read_rest(record, fields)

    def _take_of(self, record: ChoiceRecord | None, part: Part) -> None:
        if record is None:
            return
        self._show(record, part.said)
        expected = None
        if part.ids is not None:
            expected = len(part.ids)
            self._tokens += expected
            record.ids += part.ids
        if self.prepared.ids_as_tokens:
            before = record.claim.rows
            if part.claim is not None:
                record.claim.take(part.claim, expected)
            elif expected:
                record.claim.skip(expected)
            self._rows += record.claim.rows - before

    def _read_rest(self, record: ChoiceRecord, fields: Object) -> None:
        prompt = fields.get("prompt_token_ids")
        if not is_null(prompt) and (fault := self._prompts.read_of(record, prompt)):
            self.fault(fault)
        self._read_end(record, fields)

    def _show(self, record: ChoiceRecord, said: Shown) -> None:
        if said.fault:
            record.faults[said.fault] = None
        if record.finish_reason is not None and (said.text or said.reasoning or said.older or said.calls):
            # Some clients stop where a choice has its end.
            record.faults[ODD] = None
        if self._characters + said.characters > self.allowed.characters:
            self.fault("too_large")
            return
        self._characters += said.characters
        self._calls += record.transcript.add(said, MAX_CALLS - self._calls)
        if said.calls and self._calls >= MAX_CALLS:
            self.fault("too_large")

    def finished(self) -> bool:
        """Whether every choice asked for has its finish reason."""
        ended = sum(record.finish_reason is not None for record in self.choices.values())
        return ended >= self.expected

    def used(self) -> tuple[int | None, int | None]:
        """Tokens of the prompts and of the answers so far: by their ids, as billed, or as their text lets guess."""
        self.catch_up()
        billed_prompt = billed_answer = None
        if self._usage is not None:
            billed_prompt = believed(self._usage.prompt_tokens)
            billed_answer = believed(self._usage.completion_tokens)
        prompts = [self.prompt_of(at * self.prepared.n) for at in range(self.prepared.prompts)]
        counted = sum(len(ids) for ids in prompts if ids is not None)
        answer = self._tokens or billed_answer or self._rows or -(-self._characters // _CHARACTERS_PER_TOKEN)
        return counted or billed_prompt, answer

    def evidence(self, **meta: Any) -> list[Evidence]:
        """One Evidence per choice, for whatever arrived; `meta` overrides fields."""
        self.catch_up()
        return compose(self, meta)

    def prompt_of(self, index: int) -> Ids | None:
        """Prompt ids of a choice; in completions another choice of the same prompt may have brought them."""
        return self._prompts.of(self._records.get(index), index // self.prepared.n)

    def counted(self) -> Usage | None:
        """Usage as billed, with what was counted here beside it."""
        if self._usage is None:
            return None
        prompts = [self.prompt_of(at * self.prepared.n) for at in range(self.prepared.prompts)]
        return billed.usage(self._usage, sum(len(ids) for ids in prompts if ids is not None), self._tokens)

    def _record(self, index: Raw | None) -> ChoiceRecord | None:
        return self._record_at(self._place(index))

    def _place(self, index: Raw | None) -> int:
        try:
            return _integer.decode(index) if index is not None else 0
        except UNREADABLE:
            return -1

    def _record_at(self, at: int) -> ChoiceRecord | None:
        if not 0 <= at < self.expected:
            self.fault("bad_ids")
            return None
        record = self._records.get(at)
        if record is None:
            record = self._records[at] = ChoiceRecord(at // self.prepared.n)
        return record

    def _read_ids(self, record: ChoiceRecord, value: Raw | None) -> int | None:
        """Appends a choice's token ids; returns how many there were, None when they did not come."""
        if value is None or is_null(value):
            return None
        if self._tokens + bytes(value).count(b",") > self.allowed.tokens:
            self.fault("too_large")
            return None
        try:
            ids = array("i", _ids.decode(value))
            if ids and min(ids) < 0:
                raise ValueError("negative id")
        except (*UNREADABLE, TypeError):
            record.faults["bad_ids"] = None
            return None
        self._tokens += len(ids)
        if self._tokens > self.allowed.tokens:
            self.fault("too_large")
            return None
        record.ids += ids
        return len(ids)

    def _read_claim(self, record: ChoiceRecord, logprobs: Raw | None, expected: int | None) -> None:
        """Appends a choice's logprobs; rows that come without ids count against the same limit as ids."""
        left = self.allowed.tokens - self._rows
        if self._tokens > self.allowed.tokens or left < 0:
            self.fault("too_large")
            return
        before = record.claim.rows
        if not is_null(logprobs):
            assert logprobs is not None
            if record.claim.add(self.prepared.endpoint, logprobs, expected, left):
                self.fault("too_large")
        elif expected:
            record.claim.skip(expected)
        self._rows += record.claim.rows - before

    def _read_end(self, record: ChoiceRecord, fields: Object) -> None:
        for name in ("finish_reason", "stop_reason", "routed_experts"):
            value = fields.get(name)
            if value is None or is_null(value):
                continue
            try:
                if name == "finish_reason":
                    self._read_reason(record, short(_string.decode(value)))
                elif name == "stop_reason":
                    record.stop_reason = short(_reason.decode(value))
                else:
                    self._read_experts(record, _string.decode(value))
            except UNREADABLE:
                self.fault("bad_routed_experts" if name == "routed_experts" else "invalid_json")

    def _read_reason(self, record: ChoiceRecord, reason: str) -> None:
        if record.finish_reason not in (None, reason):
            # Some clients take the first, some the last.
            record.faults[ODD] = None
        record.finish_reason = reason

    def _read_experts(self, record: ChoiceRecord, text: str) -> None:
        self._experts += len(text) - len(record.experts or "")
        if self._experts > MAX_BYTES * 4 // 3:
            self._experts -= len(text)
            record.experts = None
            self.fault("too_large")
        else:
            record.experts = text
