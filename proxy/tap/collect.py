"""Evidence of one response, gathered field by field as frames pass."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw

from policies.evidence import Evidence, Ids, Usage
from proxy.tap import billed
from proxy.tap.allowed import Allowed
from proxy.tap.claim import WIDTH, Claim, fitted
from proxy.tap.experts import MAX_BYTES, decode_experts
from proxy.tap.outline import is_wider, size_of
from proxy.tap.rawjson import UNREADABLE, Object, is_null
from proxy.tap.shown import MAX_CALLS, Shown, Transcript
from proxy.tap.trim import trimmed
from proxy.tap.types import Prepared

_CHARACTERS_PER_TOKEN = 4
_LONGEST_REASON = 4096
"""Characters of a finish or stop reason; the latter may be one of the client's stop strings."""


_MOST_UNCOUNTED = 32 * 1024
"""Bytes of choices that are read without being counted first."""
_SPARE_CHOICES = 256

Reason = TypeVar("Reason", str, "int | str")

_ids = msgspec.json.Decoder(list[int])
_string = msgspec.json.Decoder(str)
_integer = msgspec.json.Decoder(int)
_reason = msgspec.json.Decoder(int | str)


class ChoiceRecord:
    """What arrived of one choice."""

    def __init__(self, prompt: int = 0) -> None:
        self.prompt = prompt
        self.ids = array("i")
        self.claim = Claim()
        self.transcript = Transcript()
        self.prompt_ids: Ids | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.experts: str | None = None
        self.faults: dict[str, None] = {}

    @property
    def started(self) -> bool:
        """Whether anything came that evidence should belong to."""
        return bool(self.ids or self.transcript or self.finish_reason is not None or self.claim.rows)


class Collector:
    """Evidence of one response. Reads what the backend sends and never raises on it."""

    def __init__(self, prepared: Prepared, allowed: Allowed) -> None:
        self.prepared = prepared
        self.allowed = allowed
        self.choices: dict[int, ChoiceRecord] = {}
        self.faults: dict[str, None] = {}
        self.terminal = False
        self.prompt_ids: Ids | None = None
        self._usage: billed.Billed | None = None
        self._tokens = 0
        self._rows = 0
        self._characters = self._calls = 0
        self._prompt_tokens = 0
        self._prompts: dict[int, Ids] = {}
        self._experts = 0
        self.expected = prepared.prompts * prepared.n

    @property
    def held(self) -> int:
        """Bytes that what is kept takes, roughly."""
        rows = self._rows * 2 * WIDTH * 4
        return rows + 4 * (self._tokens + self._prompt_tokens + self._characters) + self._experts

    def fault(self, code: str) -> None:
        """Remembers what the backend withheld or broke."""
        self.faults[code] = None

    def too_many(self, top: Object) -> bool:
        """Whether a large response, or chunk, has many more choices than were asked for."""
        choices = top.get("choices")
        if choices is None or size_of(choices) <= _MOST_UNCOUNTED:
            return False
        return is_wider(bytes(choices), 1, self.expected + _SPARE_CHOICES)

    def response(self, top: Object) -> None:
        """Reads the fields of a whole response or of a stream's chunk."""
        prompt = top.get("prompt_token_ids")
        if self.prompt_ids is None and not is_null(prompt):
            self.prompt_ids = self._read_prompt(prompt)
        usage = top.get("usage")
        if usage is not None and not is_null(usage):
            self._usage = billed.read(usage)

    def choice(self, fields: Object, said: Shown) -> ChoiceRecord | None:
        """Reads one choice (or its delta); `said` is what it shows."""
        record = self._record(fields.get("index"))
        if record is None:
            return None
        self._show(record, said)
        expected = self._read_ids(record, fields.get("token_ids"))
        if self.prepared.ids_as_tokens:
            self._read_claim(record, fields.get("logprobs"), expected)
        prompt = fields.get("prompt_token_ids")
        if not is_null(prompt) and record.prompt_ids is None:
            record.prompt_ids = self._read_prompt(prompt, self._prompts.get(record.prompt))
            if record.prompt_ids is not None:
                self._prompts.setdefault(record.prompt, record.prompt_ids)
        self._read_end(record, fields)
        return record

    def _show(self, record: ChoiceRecord, said: Shown) -> None:
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
        billed_prompt = billed_answer = None
        if self._usage is not None:
            billed_prompt, billed_answer = self._usage.prompt_tokens, self._usage.completion_tokens
        prompts = [self._prompt_of(at * self.prepared.n) for at in range(self.prepared.prompts)]
        counted = sum(len(ids) for ids in prompts if ids is not None)
        answer = (
            self._tokens or max(billed_answer or 0, 0) or self._rows or -(-self._characters // _CHARACTERS_PER_TOKEN)
        )
        return counted or billed_prompt, answer

    def evidence(self, **meta: Any) -> list[Evidence]:
        """One Evidence per choice that began; a cleanly ended response accounts for every choice asked for."""
        clean = self.terminal and not ({"upstream_error", "invalid_json"} & self.faults.keys())
        indices = set(range(self.expected)) if clean else {i for i, r in self.choices.items() if r.started}
        usage = self._counted()
        found = [self._evidence(index, usage, meta) for index in sorted(indices or {0})]
        return trimmed(found, self.allowed.evidence)

    def _evidence(self, index: int, usage: Usage | None, meta: dict[str, Any]) -> Evidence:
        prepared = self.prepared
        record = self.choices.get(index) or ChoiceRecord()
        prompt_ids = self._prompt_of(index)
        output_ids = np.array(record.ids, np.int32)
        claim_ids, claim_logprobs = record.claim.arrays()
        if not len(output_ids) and record.claim.rows:
            output_ids = claim_ids[:, 0].copy()
            record.faults["no_token_ids"] = None
        faults = self._faults(record, output_ids, claim_ids, prompt_ids)
        claim_ids, claim_logprobs = fitted(claim_ids, claim_logprobs, len(output_ids) if record.claim.present else None)
        experts = None
        if record.experts is not None:
            rows = None if prompt_ids is None or not len(output_ids) else len(prompt_ids) + len(output_ids) - 1
            experts = decode_experts(record.experts, rows)
            if experts is None:
                faults["bad_routed_experts"] = None
        sampling = prepared.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index % prepared.n)
        values: dict[str, Any] = {
            "id": "",
            "endpoint": prepared.endpoint,
            "backend": "",
            "model": prepared.served_model,
            "sampling": sampling,
            "index": index,
            "stream": prepared.upstream_stream,
            "request": prepared.body,
            "prompt_ids": np.zeros(0, np.int32) if prompt_ids is None else prompt_ids,
            "output_ids": output_ids,
            "claim_ids": claim_ids,
            "claim_logprobs": claim_logprobs,
            "text": record.transcript.text,
            "reasoning": record.transcript.reasoning,
            "tool_calls": record.transcript.tool_calls,
            "finish_reason": record.finish_reason,
            "stop_reason": record.stop_reason,
            "usage": usage,
            "routed_experts": experts,
            "faults": tuple(faults),
            "complete": self.terminal and record.finish_reason is not None,
        }
        return Evidence(**(values | meta))

    def _faults(self, record: ChoiceRecord, output_ids: Ids, claim_ids: Ids, prompt_ids: Ids | None) -> dict[str, None]:
        faults = {**self.faults, **record.faults}
        claim = record.claim
        began = record.started or self.terminal
        if began and not len(output_ids):
            faults["no_token_ids"] = None
        if began and prompt_ids is None:
            faults["no_prompt_ids"] = None
        if not self.prepared.ids_as_tokens:
            faults["no_tokenizer"] = None
        elif began and not claim.present:
            faults["no_logprobs"] = None
        elif claim.bad_logprobs or (claim.present and (len(claim_ids) != len(output_ids) or not claim_ids.size)):
            faults["bad_logprobs"] = None
        named = claim_ids[: len(output_ids), 0] if claim_ids.size else output_ids[:0]
        if claim.bad_ids or bool(((named != output_ids[: len(named)]) & (named >= 0)).any()):
            faults["bad_ids"] = None
        elif bool((claim_ids[:, 0] < 0).any() if claim_ids.size else False) and claim.present:
            faults["bad_logprobs"] = None
        if self.faults.keys() & {"upstream_error"} and not record.started:
            return dict.fromkeys(self.faults)
        return faults

    def _prompt_of(self, index: int) -> Ids | None:
        """Prompt ids of a choice; in completions another choice of the same prompt may have brought them."""
        if self.prompt_ids is not None:
            return self.prompt_ids
        record = self.choices.get(index)
        own = None if record is None else record.prompt_ids
        return self._prompts.get(index // self.prepared.n) if own is None else own

    def _counted(self) -> Usage | None:
        if self._usage is None:
            return None
        prompts = [self._prompt_of(at * self.prepared.n) for at in range(self.prepared.prompts)]
        return billed.usage(self._usage, sum(len(ids) for ids in prompts if ids is not None), self._tokens)

    def _record(self, index: Raw | None) -> ChoiceRecord | None:
        try:
            at = _integer.decode(index) if index is not None else 0
        except UNREADABLE:
            at = -1
        if not 0 <= at < self.expected:
            self.fault("bad_ids")
            return None
        record = self.choices.get(at)
        if record is None:
            record = self.choices[at] = ChoiceRecord(at // self.prepared.n)
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

    def _read_prompt(self, value: Raw | None, known: Ids | None = None) -> Ids | None:
        """Prompt ids; the same array where they are the `known` ones, so that many choices hold one prompt once."""
        if value is None:
            return None
        most = self.allowed.prompt_tokens
        if bytes(value).count(b",") >= most:
            self.fault("too_large")
            return None
        try:
            ids = np.array(_ids.decode(value), np.int64)
        except (*UNREADABLE, TypeError):
            self.fault("bad_ids")
            return None
        if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
            self.fault("bad_ids")
            return None
        if known is not None and np.array_equal(ids, known):
            return known
        self._prompt_tokens += len(ids)
        if self._prompt_tokens > most:
            self.fault("too_large")
            return None
        return ids.astype(np.int32)

    def _read_end(self, record: ChoiceRecord, fields: Object) -> None:
        for name in ("finish_reason", "stop_reason", "routed_experts"):
            value = fields.get(name)
            if value is None or is_null(value):
                continue
            try:
                if name == "finish_reason":
                    record.finish_reason = _short(_string.decode(value))
                elif name == "stop_reason":
                    record.stop_reason = _short(_reason.decode(value))
                else:
                    self._read_experts(record, _string.decode(value))
            except UNREADABLE:
                self.fault("bad_routed_experts" if name == "routed_experts" else "invalid_json")

    def _read_experts(self, record: ChoiceRecord, text: str) -> None:
        self._experts += len(text) - len(record.experts or "")
        if self._experts > MAX_BYTES * 4 // 3:
            self._experts -= len(text)
            record.experts = None
            self.fault("too_large")
        else:
            record.experts = text


def _short(reason: Reason) -> Reason:
    """Raises ValueError for a reason that is none."""
    if isinstance(reason, str) and len(reason) > _LONGEST_REASON:
        raise ValueError("a reason this long is none")
    return reason
