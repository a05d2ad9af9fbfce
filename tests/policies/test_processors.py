"""Selection under everything a request can change before sampling."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import noise, selection
from policies.checks import Result
from policies.evidence import MASKED, Evidence, Sampling
from tests.policies import recorded
from tests.policies.sampler import draw

VOCABULARY = 300
EOS = (2, 7)

token = st.integers(0, VOCABULARY - 1)
few = st.sampled_from([0, 0, 0, 1])
biases = st.dictionaries(token, st.floats(-120, 120), max_size=6) | st.dictionaries(
    # Steps of a half make shifted bf16 logits tie.
    token,
    st.floats(-6, 6) | st.integers(-8, 8).map(lambda step: step / 2),
    max_size=120,
)
penalties = st.sampled_from([0.0, 0.0, 0.4, 0.5, 2.0, -0.3, -2.0])


@st.composite
def samplings(draw_: st.DrawFn) -> tuple[Sampling, tuple[tuple[int, ...], ...]]:
    allowed = draw_(st.just(()) | st.just(()) | st.sets(token, min_size=1, max_size=60).map(lambda ids: tuple(ids)))
    words = draw_(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=8))
    sampling = Sampling(
        temperature=draw_(st.sampled_from([0.0, 0.01, 0.1, 0.7, 1.0, 1.0, 1.5])),
        top_p=draw_(st.sampled_from([1.0, 1.0, 0.95, 0.7, 0.2])),
        top_k=draw_(st.sampled_from([0, 0, 1, 5, 19, 25, 60])),
        min_p=draw_(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
        seed=draw_(st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1)),
        min_tokens=draw_(st.sampled_from([0, 0, 15, 60])),
        presence_penalty=draw_(penalties),
        frequency_penalty=draw_(penalties),
        stop_token_ids=draw_(st.just(()) | st.just((11, 12))),
        logit_bias=tuple(draw_(st.just({}) | biases).items()),
        allowed_token_ids=allowed,
        bad_words=("word",) if words else (),
    )
    return sampling, tuple(words)


@given(
    asked=samplings(),
    runtime=st.sampled_from(sorted(noise.RUNTIMES)),
    chat=st.booleans(),
    legal=st.sampled_from([None, None, 12, 60]),
)
@settings(max_examples=250)
def test_an_honest_answer_never_violates(
    asked: tuple[Sampling, tuple[tuple[int, ...], ...]], runtime: str, chat: bool, legal: int | None
) -> None:
    sampling, words = asked
    random = np.random.default_rng((sampling.seed or 0) & 0xFFFF)
    allowed = None
    if legal is not None:
        # Stop ids come back where they alone are legal, which the simulation does not do.
        sampling = dataclasses.replace(sampling, grammar=True, min_tokens=0)
        allowed = np.zeros(VOCABULARY, bool)
        allowed[random.permutation(VOCABULARY)[:legal]] = True
    answer = draw(sampling, runtime, eos=EOS, bad_words=words, random=random, chat=chat, legal=allowed)
    for vocab_size in (VOCABULARY, None):
        check = selection.check(answer, vocab_size=vocab_size, eos_token_ids=EOS, bad_words=words)
        assert check.result is not Result.REJECT
        assert check.metrics["violations"] == 0, check


KINDS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": tuple((token, -5.0 if token % 2 else 3.0) for token in range(VOCABULARY))},
    "allowed": {"allowed_token_ids": tuple(range(0, VOCABULARY, 2))},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": -1.5},
    "stop ids": {"min_tokens": 40, "stop_token_ids": tuple(range(20, 120))},
    "bad words": {"bad_words": ("word",)},
}
WORDS = tuple((token,) for token in range(0, VOCABULARY, 3))


def honest(changes: dict[str, Any], temperature: float, seed: int = 5) -> Evidence:
    sampling = Sampling(temperature=temperature, seed=seed, **changes)
    words = WORDS if "bad_words" in changes else ()
    return draw(sampling, recorded.GPU, eos=EOS, bad_words=words, random=np.random.default_rng(seed), tokens=80)


def checked(answer: Evidence, **changes: Any) -> Any:
    sampling = dataclasses.replace(answer.sampling, **changes)
    answer = dataclasses.replace(answer, sampling=sampling)
    return selection.check(answer, vocab_size=VOCABULARY, eos_token_ids=EOS, bad_words=WORDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ignoring_a_parameter_is_caught(kind: str, temperature: float) -> None:
    # Two seeds, because at T = 0 a penalty seldom turns the order of few repeats.
    assert checked(honest(KINDS[kind], temperature)).result is Result.PASS
    ignored = [checked(honest({}, temperature, seed), **KINDS[kind]) for seed in range(12)]
    assert sum(int(check.metrics["violations"]) for check in ignored) > 0
    assert any(check.result is Result.REJECT for check in ignored)


@pytest.mark.parametrize("kind", KINDS)
def test_applying_a_parameter_nobody_asked_for_is_caught(kind: str) -> None:
    neutral = {name: getattr(Sampling(), name) for name in KINDS[kind]}
    check = checked(honest(KINDS[kind], 1.0), **neutral)
    assert check.result is Result.REJECT


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_is_caught(kind: str) -> None:
    check = checked(honest(KINDS[kind], 1.0), seed=6)
    assert check.result is Result.REJECT
    assert check.metrics["violations"] > 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"allowed_token_ids": (1, 2, 3)}, ()),
        ({"min_tokens": 3, "stop_token_ids": (50,)}, ()),
        ({"bad_words": ("word",)}, ((50,),)),
    ],
)
def test_a_token_that_the_request_masks_is_a_violation(
    changes: dict[str, Any], words: tuple[tuple[int, ...], ...], temperature: float
) -> None:
    ids = np.array([[50, 1, 2]], np.int32)
    logprobs = np.log(np.array([[0.9, 0.05, 0.02]], np.float32))
    sampling = Sampling(temperature=temperature, seed=3, **changes)
    answer = recorded.evidence(np.arange(5), ids, logprobs, sampling=sampling, runtime=recorded.GPU)
    check = selection.check(answer, eos_token_ids=EOS, bad_words=words)
    assert check.result is Result.REJECT
    assert check.metrics["first_violation"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_said_where_everything_is_masked(temperature: float) -> None:
    # vLLM then emits whatever its argmax makes of a row of −inf.
    ids = np.array([[0, 50, 2]], np.int32)
    logprobs = np.log(np.array([[0.1, 0.5, 0.2]], np.float32))
    held = Sampling(temperature=temperature, seed=3, allowed_token_ids=(2,), min_tokens=4)
    answer = recorded.evidence(np.arange(5), ids, logprobs, sampling=held, runtime=recorded.GPU)
    check = selection.check(answer, eos_token_ids=EOS)
    assert check.result is Result.INCONCLUSIVE
    assert (check.metrics["violations"], check.metrics["skipped"]) == (0, 1)
    # A grammar whose only way on is a stop id gets it back, in spite of `min_tokens`.
    logprobs = np.array([[0.0, MASKED, MASKED]], np.float32)
    ids = np.array([[2, 50, 51]], np.int32)
    ends = Sampling(temperature=temperature, seed=3, grammar=True, min_tokens=4)
    answer = recorded.evidence(np.arange(5), ids, logprobs, sampling=ends, runtime=recorded.GPU)
    assert selection.check(answer, eos_token_ids=EOS).metrics["violations"] == 0


def test_an_unlisted_token_lifted_by_a_bias_may_take_the_place_of_a_listed_one() -> None:
    ids = np.array([[5, 6, 7]], np.int32)
    logprobs = np.log(np.array([[0.4, 0.3, 0.2]], np.float32))
    for bias, decided in ((30.0, False), (-30.0, True)):
        sampling = Sampling(temperature=1.0, seed=1, top_k=1, logit_bias=((99, bias),))
        answer = recorded.evidence(np.arange(5), ids, logprobs, sampling=sampling, runtime=recorded.GPU)
        assert (selection.check(answer).metrics["skipped"] == 0) is decided


def test_biases_are_clamped_and_out_of_reach_ids_do_no_harm() -> None:
    ids = np.array([[5, 6, 7]], np.int32)
    logprobs = np.array([[-0.01, -150.0, -160.0]], np.float32)
    sampling = Sampling(temperature=0.0, logit_bias=((6, 1e9), (2**40, 5.0), (-3, 5.0)))
    answer = recorded.evidence(np.arange(5), ids, logprobs, sampling=sampling, runtime=recorded.GPU)
    assert selection.check(answer).result is Result.PASS


@pytest.mark.parametrize(
    ("changes", "given", "word"),
    [
        ({"bad_words": ("no",)}, {"eos_token_ids": (2,)}, "bad_words"),
        ({"min_tokens": 4}, {}, "min_tokens"),
        ({"min_tokens": 4, "stop_token_ids": (9,)}, {}, "min_tokens"),
        ({"repetition_penalty": 1.2}, {"eos_token_ids": (2,)}, "repetition_penalty"),
    ],
)
def test_what_the_declaration_lacks_is_named(changes: dict[str, Any], given: dict[str, Any], word: str) -> None:
    answer = recorded.gpu("T1")[0]
    check = selection.check(
        dataclasses.replace(answer, sampling=dataclasses.replace(answer.sampling, **changes)), **given
    )
    assert check.result is Result.INCONCLUSIVE
    assert check.by_request
    assert word in check.reason


def test_bad_words_are_tokenised_as_vllm_does() -> None:
    pieces = {"no": [5], " no": [6], "two words": [7, 8], " two words": [9, 8], "odd": [10], " odd": [11, 12], " ": []}
    table = pieces | {"same": [13], " same": [13]}
    words = ["no", "  no", "two words", "odd", "same", "no"]
    found = selection.bad_word_ids(words, lambda text: table[text])
    # A word's second form counts where it has as many tokens and begins with another.
    assert found == [(5,), (6,), (5,), (6,), (7, 8), (9, 8), (10,), (13,)]


RECORDINGS = ("processors_cpu_vllm0.32_smollm2.npz", "processors_h200_vllm0.32_smollm2.npz")


@pytest.mark.parametrize("file", RECORDINGS)
@pytest.mark.parametrize("name", recorded.processed())
def test_recorded_answers_of_a_real_server_have_no_violation(name: str, file: str) -> None:
    answer, words = recorded.processed(file)[name]
    check = selection.check(answer, vocab_size=recorded.VOCABULARY, eos_token_ids=(recorded.EOS,), bad_words=words)
    assert check.metrics["violations"] == 0
    assert check.result in (Result.PASS, Result.INCONCLUSIVE)


@pytest.mark.parametrize("file", RECORDINGS)
def test_recorded_answers_under_another_seed_violate(file: str) -> None:
    violations = tokens = 0
    for answer, words in recorded.processed(file).values():
        if answer.sampling.temperature == 0:
            continue
        sampling = dataclasses.replace(answer.sampling, seed=(answer.sampling.seed or 0) + 1)
        check = selection.check(
            dataclasses.replace(answer, sampling=sampling),
            vocab_size=recorded.VOCABULARY,
            eos_token_ids=(recorded.EOS,),
            bad_words=words,
        )
        violations += int(check.metrics["violations"] or 0)
        tokens += int(check.metrics["checked"] or 0)
    assert violations > 0.3 * tokens
