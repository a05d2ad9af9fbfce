"""Recorded streams, with all that is taken out of them, cut in two at every offset."""

from __future__ import annotations

import pytest

from proxy.tap import TokenStrings, open_tap
from proxy.tap.types import Prepared
from tests.proxy.tap.test_recorded import STREAMS, Recording, label

NAMES = ("chat-tools-auto-stream", "chat-n2-stream", "chat-emoji-logprobs2-stream", "completions-logprobs3-stream")
CUT = [one for one in STREAMS if one.folder.name.endswith("cpu") and one.name in NAMES]


def _shortened(recording: Recording) -> bytes:
    """The beginning, one event with more than ASCII in it or else the second one, and the end."""
    first, *rest = [event + b"\n\n" for event in recording.body.split(b"\n\n")[:-1]]
    foreign = [event for event in rest if not event.isascii() and len(event) < 2500]
    return b"".join([first, *(foreign or rest)[:1], *rest[-3:]])


def _shown(recording: Recording, prepared: Prepared, tokenizer: TokenStrings | None, *parts: bytes) -> bytes:
    row = recording.row
    tap = open_tap(prepared, row["model"], tokenizer=tokenizer, status=row["status"], content_type=row["content_type"])
    return b"".join([tap.feed(part) for part in parts]) + tap.close() + tap.done


@pytest.mark.parametrize("recording", CUT, ids=label)
def test_cut_in_two_at_every_offset(recording: Recording) -> None:
    data, prepared = _shortened(recording), recording.prepared()
    tokenizer = TokenStrings.load(recording.tokenizer) if recording.tokenizer else None
    want = _shown(recording, prepared, tokenizer, data)
    assert want != data
    for at in range(1, len(data)):
        assert _shown(recording, prepared, tokenizer, data[:at], data[at:]) == want, at
