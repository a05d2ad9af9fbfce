"""What the client sees of one response: the backend's answer without what we added to the request.

vLLM writes fields nobody asked for as `null`, so hiding is mostly writing `null`. Routed experts stay: a
server started to return them sends them to everybody. Objects are changed in place and keep key order.

The answer's `model` becomes the name the client asked for, where the backend answers with the name it is
served under there. A `countersign` field never passes: only we may say what a verdict is.
"""

from __future__ import annotations

from msgspec import Raw

from proxy.tap.forged import names_verdict, pop_verdict
from proxy.tap.rawjson import NULL, UNREADABLE, Object, is_null, raw, read_object, read_value, write
from proxy.tap.rebuild import Rebuilder
from proxy.tap.tokens import TokenStrings
from proxy.tap.types import Prepared

_REASONS = frozenset({"reasoning", "reasoning_content"})

_LONGEST_INDEX = 20


class View:
    """Rewrites the objects of one response for its client."""

    def __init__(self, prepared: Prepared, model_name: str, strings: TokenStrings | None) -> None:
        asked = prepared.asked
        self._chat = prepared.endpoint == "chat"
        self._asked = asked
        self._choices = prepared.prompts * prepared.n
        self._wants_logprobs = asked.logprobs is not None
        renamed = bool(model_name) and model_name != prepared.served_model
        self._served = bytes(raw(prepared.served_model)) if renamed else b""
        self._public = raw(model_name) if renamed else None
        rebuild_strings = prepared.ids_as_tokens and not asked.tokens_as_ids
        self._strings = strings if rebuild_strings else None
        self._rebuilders: dict[bytes, Rebuilder] = {}
        self._parser_seen = False

    def response(self, top: Object) -> bool:
        """Top-level fields; true when something changed."""
        changed = pop_verdict(top)
        if "error" in top:
            changed |= _without_verdict(top, "error")
        if not self._asked.token_ids and self._chat:
            changed |= _hide(top, "prompt_token_ids")
        if self._public is not None and "model" in top and bytes(top["model"]) == self._served:
            top["model"] = self._public
            changed = True
        return changed

    def delta(self, choice: Object) -> bool | None:
        """One choice of a stream's chunk: whether it changed, or None when vLLM would not have sent it."""
        changed = self._choice(choice)
        if not self._chat:
            return changed
        delta = choice.get("delta")
        empty = delta is not None and bytes(delta) == b"{}"
        if empty or not self._asked.reasoning:
            if not self._asked.reasoning:
                shown, empty, cut = self._without_reasoning(choice, delta, empty)
                changed |= cut
                if not shown:
                    return None
            if empty and not self._carries_more(choice):
                return None
        return changed

    def message(self, choice: Object, *, reasons: bool) -> bool:
        """One choice of a whole response. `reasons`: the usage shows that the backend parses reasoning."""
        changed = self._choice(choice)
        if self._asked.reasoning or not self._chat:
            return changed
        message = read_object(choice["message"]) if "message" in choice else None
        if message is not None and _hide_reasoning(message):
            choice["message"] = Raw(write(message))
            changed = reasons = True
        if reasons:
            changed |= _hide(choice, "logprobs") | _hide(choice, "token_ids")
        return changed

    def _choice(self, choice: Object) -> bool:
        changed = pop_verdict(choice)
        for name in ("message", "delta"):
            if name in choice:
                changed |= _without_verdict(choice, name)
        if not self._asked.token_ids:
            changed |= _hide(choice, "token_ids")
            if not self._chat:
                changed |= _hide(choice, "prompt_token_ids")
        if not self._wants_logprobs:
            changed |= _hide(choice, "logprobs")
        elif not is_null(choice.get("logprobs")):
            changed |= self._rebuild(choice)
        return changed

    def _rebuild(self, choice: Object) -> bool:
        key = bytes(choice.get("index", NULL))
        rebuilder = self._rebuilders.get(key)
        if rebuilder is None:
            rebuilder = Rebuilder(self._asked.logprobs or 0, self._strings)
            # Choices that nobody asked for are not remembered.
            if len(self._rebuilders) < self._choices and len(key) < _LONGEST_INDEX:
                self._rebuilders[key] = rebuilder
        logprobs = choice["logprobs"]
        for rebuild in (rebuilder.chat if self._chat else rebuilder.completions, rebuilder.salvaged):
            try:
                rebuilt = rebuild(logprobs)
                if _is_spelled_anew(logprobs, rebuilt):
                    return False
            except (*UNREADABLE, KeyError, TypeError, IndexError):
                continue
            choice["logprobs"] = rebuilt
            return True
        return False

    def _without_reasoning(self, choice: Object, delta: Raw | None, empty: bool) -> tuple[bool, bool, bool]:
        """A delta for a client that set `include_reasoning` to false: (shown, empty, changed).

        With any parser, vLLM then also hides logprobs and ids, sends no delta that only reasons, and writes
        `"reasoning": null` into the others. That there is a parser shows in the first delta that is empty
        or reasons; before that nothing is hidden, for there is nothing to hide.
        """
        fields = None if delta is None or empty else read_object(delta)
        reasons = fields is not None and not _REASONS.isdisjoint(fields)
        self._parser_seen = self._parser_seen or empty or reasons
        if not self._parser_seen:
            return True, empty, False
        changed = _hide(choice, "logprobs") | _hide(choice, "token_ids")
        ended = not is_null(choice.get("finish_reason"))
        if fields is None:
            return ended, empty, changed
        if "role" in fields:
            if _hide_reasoning(fields):
                choice["delta"] = Raw(write(fields))
                changed = True
            return True, False, changed
        if (is_null(fields.get("content")) or bytes(fields["content"]) == b'""') and "tool_calls" not in fields:
            choice["delta"] = Raw(b"{}")
            return ended, True, True
        order = ("role", "content", "reasoning")
        known = {name: fields.get(name, NULL) for name in order if name in fields or name == "reasoning"}
        known["reasoning"] = NULL
        _hide_reasoning(fields)
        choice["delta"] = Raw(write({**known, **{k: v for k, v in fields.items() if k not in known}}))
        return True, False, True

    def _carries_more(self, choice: Object) -> bool:
        """Whether an empty delta is sent all the same: at the end, or for what the client asked for."""
        return (
            not is_null(choice.get("finish_reason"))
            or (self._wants_logprobs and not is_null(choice.get("logprobs")))
            or (self._asked.token_ids and not is_null(choice.get("token_ids")))
        )


def _without_verdict(choice: Object, name: str) -> bool:
    """Takes `countersign` out of a message, a delta or an error."""
    text = bytes(choice[name])
    if not names_verdict(text):
        return False
    fields = read_object(text)
    if fields is None or not pop_verdict(fields):
        return False
    choice[name] = raw(fields)
    return True


def _hide_reasoning(fields: Object) -> bool:
    """Under either name: `reasoning`, or that of older engines."""
    hidden = [_hide(fields, name) for name in fields.keys() & _REASONS]
    return any(hidden)


def _hide(fields: Object, name: str) -> bool:
    value = fields.get(name)
    if value is None or bytes(value) == b"null":
        return False
    fields[name] = NULL
    return True


def _is_spelled_anew(old: Raw, new: Raw) -> bool:
    """Whether a backend that did nothing we asked for said this already; then its own bytes stay."""
    return b'"token_id:' not in bytes(old) and read_value(old) == read_value(new)
