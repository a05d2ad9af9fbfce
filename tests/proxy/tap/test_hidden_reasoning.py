"""Reasoning that the client does not want is shown under no name, and stays evidence under any."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.tap.bodies import DONE, body, choice, chunk, ending, opening, run, stream_tap, whole_tap

NAMES = [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")]


@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_of_a_stream(names: tuple[str, ...]) -> None:
    thought: dict[str, Any] = dict.fromkeys(names, "secret")
    sent = (
        chunk(choice(delta={"role": "assistant", "content": "", **thought}))
        + chunk(choice(delta=thought))
        + chunk(choice(delta={"content": "a", **thought}))
        + chunk(choice(delta={"content": "b"}))
        + ending()
        + DONE
    )
    tap = stream_tap(include_reasoning=False)
    shown = run(tap, opening() + sent)
    assert b"secret" not in shown
    assert b'"content":"a"' in shown
    assert b'"content":"b"' in shown
    (evidence,) = tap.evidence()
    assert (evidence.text, evidence.reasoning) == ("ab", "secret" * 3)
    assert len(evidence.output_ids) == 5
    wanted = stream_tap()
    assert run(wanted, opening() + sent).count(b"secret") == 3 * len(names)


@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_of_a_whole_answer(names: tuple[str, ...]) -> None:
    value = body()
    value["choices"][0]["message"] |= dict.fromkeys(names, "secret")
    sent = json.dumps(value).encode()
    tap = whole_tap(include_reasoning=False, return_token_ids=True)
    message = json.loads(run(tap, sent))["choices"][0]
    assert all(message["message"][name] is None for name in names)
    assert message["token_ids"] is None
    assert tap.evidence()[0].reasoning == "secret"
    assert run(whole_tap(), sent).count(b"secret") == len(names)
