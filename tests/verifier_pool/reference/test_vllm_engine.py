from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from policies.errors import ReplayError, SettingsError
from policies.evidence import ReplayForm
from policies.settings import ReferenceSettings
from verifier_pool.reference import open_reference
from verifier_pool.reference.base import Reference, ReplayRequest

# vLLM and torch warn while they are imported.
pytestmark = pytest.mark.filterwarnings("default")


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(SettingsError, match=r"models\.m\.reference\.path"):
        open_reference("m", ReferenceSettings(kind="vllm_engine", path="/nowhere/at/all", timeout=60))


def test_without_vllm_the_message_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from policies.settings import ReferenceSettings\n"
        "from verifier_pool.reference import open_reference\n"
        f"open_reference('m', ReferenceSettings(kind='vllm_engine', path={str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "extra `vllm`" in done.stderr


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Reference]:
    arguments = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 512, "enforce_eager": True}
    reference = open_reference(
        "smollm2", ReferenceSettings(kind="vllm_engine", path=str(model_dir), engine=arguments, timeout=60)
    )
    yield reference
    reference.close()


def ids(*numbers: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.asarray(numbers, np.int32)


def asking(endpoint: Any, body: dict[str, Any], choice: int = 0) -> ReplayRequest:
    return ReplayRequest(ids(504, 3575), ids(282, 253), endpoint, orjson.dumps(body), choice)


@pytest.mark.e2e
def test_replays_agree_whatever_the_batch(engine: Reference) -> None:
    text = np.random.default_rng(1).integers(100, 40_000, 240).astype(np.int32)
    requests = [ReplayRequest(text[: 20 * n], text[20 * n : 20 * n + 16], "chat", b"") for n in range(1, 9)]
    together = engine.replay(requests)
    alone = [engine.replay([request])[0] for request in requests]
    for request, one, other in zip(requests, together, alone, strict=True):
        assert one.ids.shape == one.logprobs.shape == (16, 21)
        assert np.array_equal(one.ids[:, 0], request.output_ids)
        assert np.isfinite(one.logprobs[:, 0]).all()
        assert np.abs(one.logprobs[:, 0] - other.logprobs[:, 0]).mean() < 0.3
        others = one.logprobs[:, 1:]
        assert (np.diff(others, axis=1)[np.isfinite(others[:, 1:])] <= 0).all()
        assert (np.exp(one.logprobs.astype(np.float64)).sum(axis=1) < 1.001).all()
        assert one.reference == engine.name
    assert engine.name.startswith("vllm_engine vllm-0.32")


@pytest.mark.e2e
def test_claimed_ids_stand_behind_the_engines_own(engine: Reference) -> None:
    text = np.random.default_rng(2).integers(100, 40_000, 40).astype(np.int32)
    plain = ReplayRequest(text[:24], text[24:], "chat", b"")
    (without,) = engine.replay([plain])
    # What is likely elsewhere in the text is often among the 64 best here, outside the 20.
    likely = np.unique(without.ids[without.ids >= 0])[:60]
    deep = engine.replay([replace(plain, candidate_ids=np.tile(likely, (16, 1)))])[0]
    assert deep.ids.shape[1] > 21
    hostile = np.tile(np.array([-7, 49_152, 2**31 - 1, 5, 5, -1], np.int64), (16, 1))
    claimed = np.concatenate([hostile, without.ids[:, ::-1], deep.ids[:, 21:23]], axis=1)
    forms: tuple[ReplayForm, ...] = ("full", "ids")
    replays = engine.replay([replace(plain, candidate_ids=claimed, form=form) for form in forms])
    for replay in replays:
        # The V1 runner cannot score given ids alone: it answers in form `full` whatever was asked.
        assert (replay.form, replay.own) == ("full", 21)
        # Another batch may swap what is nearly tied.
        same = (replay.ids[:, :21, None] == without.ids[:, None, :]).any(axis=2)
        assert same.mean() > 0.9
        assert np.abs(replay.logprobs[:, 0] - without.logprobs[:, 0]).mean() < 0.3
        assert not np.isin(replay.ids, [-7, 49_152, 2**31 - 1]).any()
        for row in replay.ids:
            assert len(set(row[row >= 0])) == (row >= 0).sum()
    assert without.own == without.ids.shape[1] == 21


@pytest.mark.e2e
def test_a_replay_of_every_shape_of_claim(engine: Reference) -> None:
    text = np.arange(200, 216, dtype=np.int32)
    plain = ReplayRequest(text[:8], text[8:], "chat", b"")
    odd = [np.zeros((0, 0), np.int32), np.zeros((8, 0), np.int32), np.full((3, 21), 9, np.int32),
           np.full((50, 1), -1, np.int32), np.full((8, 500), 7, np.int32), None]  # fmt: skip
    for replay in engine.replay([replace(plain, candidate_ids=claim) for claim in odd]):
        assert replay.ids.shape == replay.logprobs.shape
        assert np.array_equal(replay.ids[:, 0], plain.output_ids)
    with pytest.raises(ReplayError, match="nothing_to_replay"):
        engine.replay([replace(plain, prompt_ids=text[:0])])


@pytest.mark.e2e
def test_prompts_are_rendered_as_vllm_would(engine: Reference) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    message = {"role": "user", "content": "hi"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    plain, with_tools, parts, continued, text, bare, second, media = engine.replay(
        [
            asking("chat", {"messages": [message], "seed": 1, "logprobs": True, "top_logprobs": 20, "n": 2}),
            asking("chat", {"messages": [message], "tools": [tool], "tool_choice": "auto"}),
            asking("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
            asking("chat", {"messages": [message, {"role": "assistant", "content": "hello"}],
                            "continue_final_message": True, "add_generation_prompt": False}),
            asking("completions", {"prompt": "hi"}),
            asking("completions", {"prompt": [504, 3575]}),
            asking("completions", {"prompt": ["hi", "yo there"], "n": 2}, choice=2),
            asking("chat", {"messages": [{"role": "user", "content": [image]}]}),
        ]
    )  # fmt: skip
    known = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    known += [2, 198, 1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
    assert plain.prompt_ids is not None
    assert plain.prompt_ids.tolist() == known
    assert parts.prompt_ids is not None
    assert parts.prompt_ids.tolist() == known
    assert with_tools.prompt_ids is not None
    assert continued.prompt_ids is not None
    assert continued.prompt_ids.tolist() == [*known, *continued.prompt_ids[len(known) :]]
    assert text.prompt_ids is not None
    assert text.prompt_ids.tolist() == [6004]
    assert bare.prompt_ids is not None
    assert bare.prompt_ids.tolist() == [504, 3575]
    assert second.prompt_ids is not None
    assert second.prompt_ids.tolist() == [31041, 665]
    assert media.prompt_ids is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("prompt", "output", "reason"),
    [(np.ones(500, np.int32), np.ones(12, np.int32), "too_long"), (ids(1), ids(49_152), "bad_ids")],
)
def test_what_would_hurt_the_engine_never_reaches_it(engine: Reference, prompt: Any, output: Any, reason: str) -> None:
    with pytest.raises(ReplayError) as caught:
        engine.replay([ReplayRequest(prompt, output, "chat", b"")])
    assert caught.value.reason == reason


@pytest.mark.e2e
def test_both_sides_of_the_longest(engine: Reference) -> None:
    text = np.random.default_rng(5).integers(100, 40_000, 512).astype(np.int32)
    assert engine.max_tokens == 511
    (replay,) = engine.replay([ReplayRequest(text[:500], text[500:511], "chat", b"")])
    assert replay.ids.shape[0] == 11
    with pytest.raises(ReplayError, match="too_long"):
        engine.replay([ReplayRequest(text[:500], text[500:], "chat", b"")])


@pytest.mark.e2e
def test_its_canaries_tell_its_weights_from_others(engine: Reference) -> None:
    canary = engine.canary
    assert canary is not None
    for turn in range(4):
        assert canary.due(1000.0 * turn)
        assert canary.judge(engine.replay(canary.requests()))
    assert canary.due(9000)
    replays = engine.replay(canary.requests())
    assert not canary.judge([replace(replay, logprobs=replay.logprobs - 1) for replay in replays])


@pytest.mark.e2e
def test_cancelled_replays_leave_the_engine(engine: Reference) -> None:
    text = np.random.default_rng(6).integers(100, 40_000, 400).astype(np.int32)
    long = ReplayRequest(text[:200], text[200:], "chat", b"")
    futures = [engine.submit(long) for _ in range(40)]
    assert all(future.cancel() for future in futures)
    (replay,) = engine.replay([ReplayRequest(text[:20], text[20:30], "chat", b"")])
    assert replay.ids.shape[0] == 10


@pytest.mark.e2e
def test_a_killed_engine_starts_again(engine: Reference) -> None:
    request = ReplayRequest(ids(1, 9690, 198, 2683), ids(359, 253, 5356), "chat", b"")
    before = engine.replay([request])[0]
    for child in multiprocessing.active_children():
        child.kill()
    # Whoever the engine held when it died goes down with it; who comes later waits for the next one.
    with contextlib.suppress(ReplayError):
        engine.replay([request])
    after = engine.replay([request])[0]
    assert np.abs(before.logprobs[:, 0] - after.logprobs[:, 0]).max() < 1e-3
