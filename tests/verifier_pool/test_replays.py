from __future__ import annotations

import contextlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ReplayError
from policies.evidence import Evidence, Replay
from tests.verifier_pool.toy import ToyReference, answer
from verifier_pool import packing, replays
from verifier_pool.packing import pack_outcomes, pack_requests, unpack_outcomes, unpack_requests
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.replays import is_second, queue_of, replay_job, request_of, response_of

EXPERTS = np.arange(14 * 2 * 2, dtype=np.uint8).reshape(14, 2, 2)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


def fields(value: ReplayRequest | Replay) -> dict[str, object]:
    return {name: getattr(value, name) for name in type(value).__slots__}


def replayed(evidence: Evidence, **changes: object) -> Replay:
    (found,) = ToyReference().replay([request_of(evidence)])
    return replace(found, **changes)  # type: ignore[arg-type]


def test_requests_come_back_as_they_were() -> None:
    first = answer(routed_experts=EXPERTS, request='{"messages":["é"]}'.encode())
    requests = [request_of(first, "ids", experts=True), request_of(replace(first, index=1))]
    requests.append(replace(requests[0], candidate_ids=None, request=b"", endpoint="completions", choice=2))
    found = unpack_requests(pack_requests(requests))
    for one, other in zip(requests, found, strict=True):
        assert all(same(value, fields(other)[name]) for name, value in fields(one).items())


def test_no_logprob_goes_to_a_reference() -> None:
    evidence = answer()
    packed = zstandard.ZstdDecompressor().decompress(pack_requests([request_of(evidence)]))
    assert evidence.claim_logprobs[0].tobytes() not in packed
    assert evidence.claim_ids.tobytes() in packed
    assert b"f4" not in packed


def test_outcomes_come_back_as_they_were() -> None:
    evidence = answer()
    outcomes: list[Replay | ReplayError] = [
        replayed(evidence, prompt_ids=evidence.prompt_ids, own=3, routed_experts=EXPERTS),
        ReplayError("too_long", "what it was"),
        replayed(evidence, form="ids", routed_experts=EXPERTS.astype(np.int16)),
    ]
    first, error, last = unpack_outcomes(pack_outcomes(outcomes), [evidence] * 3)
    assert isinstance(error, ReplayError)
    assert (error.reason, str(error)) == ("too_long", "too_long")
    for one, other in ((outcomes[0], first), (outcomes[2], last)):
        assert isinstance(one, Replay)
        assert isinstance(other, Replay)
        assert all(same(value, fields(other)[name]) for name, value in fields(one).items())


def test_one_reason_is_that_of_all_choices() -> None:
    found = unpack_outcomes(pack_outcomes([ReplayError("reference_backlog")]), [answer(), answer()])
    assert [str(each) for each in found] == ["reference_backlog"] * 2


def test_what_would_be_too_large_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = answer()
    monkeypatch.setattr(packing, "MAX_UNPACKED", 100)
    with pytest.raises(ReplayError, match="too_long"):
        pack_requests([request_of(evidence)])
    packed = pack_outcomes([replayed(evidence), replayed(evidence)])
    monkeypatch.undo()
    assert [str(each) for each in unpack_outcomes(packed, [evidence] * 2)] == ["too_long"] * 2


def test_a_bomb_is_not_unpacked() -> None:
    with pytest.raises(ReplayError, match="bad_replay"):
        unpack_requests(zstandard.compress(bytes(packing.MAX_UNPACKED + 1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"output_ids": np.zeros(11, np.int32)},
        {"output_ids": np.zeros(0, np.int32), "candidate_ids": None},
        {"prompt_ids": np.zeros(0, np.int32)},
        {"choice": -1},
    ],
)
def test_requests_that_make_no_sense(changes: dict[str, object]) -> None:
    packed = pack_requests([replace(request_of(answer()), **changes)])  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="bad_replay"):
        unpack_requests(packed)


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": np.zeros((3, 4), np.int32), "logprobs": np.zeros((3, 4), np.float32)},
        {"ids": np.zeros((12, 4), np.int32)},
        {"ids": np.zeros((12, 0), np.int32), "logprobs": np.zeros((12, 0), np.float32)},
        {"own": 99},
        {"own": -1},
        {"logprobs": np.full((12, 21), np.nan, np.float32)},
        {"routed_experts": EXPERTS[:5]},
    ],
)
def test_replays_that_do_not_fit_their_choice(changes: dict[str, object]) -> None:
    evidence = answer()
    (found,) = unpack_outcomes(pack_outcomes([replayed(evidence, **changes)]), [evidence])
    assert isinstance(found, ReplayError)
    assert found.reason == "bad_replay"


def test_outcomes_of_another_number_of_choices() -> None:
    evidence = answer()
    found = unpack_outcomes(pack_outcomes([replayed(evidence)]), [evidence] * 2)
    assert [str(each).partition(":")[0] for each in found] == ["bad_replay"] * 2


REQUESTS = pack_requests([request_of(answer())])
RAW = zstandard.ZstdDecompressor().decompress(REQUESTS)
OUTCOMES = pack_outcomes([replayed(answer()), ReplayError("timeout")])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=20) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from(["v", "requests", "outcomes"]), inner),
    max_leaves=30,
)


def damaged(data: bytes, at: int, value: int, cut: int) -> bytes:
    changed = bytearray(data)
    changed[at % len(changed)] = value
    return bytes(changed[: len(changed) - cut % len(changed)] if cut else changed)


@given(st.integers(0, 10**6), st.integers(0, 255), st.integers(0, 3))
def test_damaged_bytes_give_a_value_or_an_error(at: int, value: int, cut: int) -> None:
    for data in (damaged(REQUESTS, at, value, cut), zstandard.compress(damaged(RAW, at, value, cut))):
        with contextlib.suppress(ReplayError):
            for request in unpack_requests(data):
                assert request.prompt_ids.dtype == request.output_ids.dtype == np.int32
    for found in unpack_outcomes(damaged(OUTCOMES, at, value, cut), [answer()] * 2):
        assert isinstance(found, Replay | ReplayError)


@given(ANYTHING)
def test_whatever_is_there_gives_a_value_or_an_error(value: object) -> None:
    data = msgspec.msgpack.encode(value)
    for packed in (data, zstandard.compress(data)):
        with pytest.raises(ReplayError):
            unpack_requests(packed)
    assert all(isinstance(found, ReplayError) for found in unpack_outcomes(data, [answer()]))


@given(st.text(), st.text())
def test_every_model_has_a_queue_of_its_own(one: str, other: str) -> None:
    names = {queue_of(model, second=second) for model in {one, other} for second in (False, True)}
    assert len(names) == 2 * len({one, other})
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") for name in names)


def test_names_of_jobs() -> None:
    for second in (False, True):
        job = replay_job("a" * 32, second=second)
        assert (response_of(job), is_second(job)) == ("a" * 32, second)


def test_a_replay_is_nothing_to_call() -> None:
    with pytest.raises(RuntimeError):
        replays.replay("a" * 32)
