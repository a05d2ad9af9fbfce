"""Sampling noise against independent implementations and against torch's own generator."""

from __future__ import annotations

import mmh3
import numpy as np
import pytest

from policies import noise

# torch 2.13.0, CPU: torch.Generator().manual_seed(seed), then torch.randint(0, 2**31) three times.
TORCH_DRAWS = {
    0: (398764591, 1478610112, 1537364731),
    7: (976413892, 1369975286, 2053951699),
    2**31: (1439962116, 1548966947, 696863241),
    2**32 - 1: (479346978, 269265991, 113049152),
    2**32: (398764591, 1478610112, 1537364731),
    2**32 + 7: (976413892, 1369975286, 2053951699),
    2**40 + 12345: (1675701733, 561383553, 170765737),
    2**63 - 1: (479346978, 269265991, 113049152),
    -1: (479346978, 269265991, 113049152),
    -7: (648898429, 1637563955, 2079678625),
    -(2**31): (1439962116, 1548966947, 696863241),
    -(2**63): (398764591, 1478610112, 1537364731),
}
MASK = 2**64 - 1


def splitmix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31 + 5, 2**32 - 1, 2**40 + 3, 2**63 - 1, -2, -(2**63)])
@pytest.mark.parametrize("prompt_tokens", [1, 37, 100_000])
def test_gpu_noise_is_murmur3_of_seed_position_and_token(seed: int, prompt_tokens: int) -> None:
    ids = np.random.default_rng(0).integers(0, 2**31 - 1, size=(6, 5), dtype=np.int32)
    ids[0, 0] = 0
    got = noise.gumbel("vllm-0.32-v2", seed, prompt_tokens, ids)
    assert got is not None
    for (row, column), token in np.ndenumerate(ids):
        words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, prompt_tokens - 1 + row, int(token)]
        hashed = mmh3.hash(b"".join(word.to_bytes(4, "little") for word in words), 0, signed=False)
        uniform = float(np.float32((hashed + 0.5) * 2.0**-32))
        assert got[row, column] == pytest.approx(-np.log(-np.log1p(-uniform)), abs=1e-9)


@pytest.mark.parametrize("seed", TORCH_DRAWS)
def test_cpu_noise_follows_torch_for_every_64_bit_seed(seed: int) -> None:
    ids = np.array([[0, 5, 49_151], [1, 6, 49_150], [2, 7, 2**31 - 1]], np.int32)
    got = noise.gumbel("vllm-0.32-v1-cpu", seed, 0, ids)
    assert got is not None
    for row, draw in enumerate(TORCH_DRAWS[seed]):
        for column, token in enumerate(ids[row]):
            bits = splitmix((splitmix(draw) + (int(token) + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11
            assert got[row, column] == pytest.approx(-np.log(-np.log((bits + 0.5) * 2.0**-53)), abs=1e-12)


@pytest.mark.parametrize("runtime", noise.RUNTIMES)
def test_noise_follows_the_gumbel_law_and_pads_stay_finite(runtime: str) -> None:
    ids = np.arange(-1, 39_999, dtype=np.int32).reshape(200, 200)
    got = noise.gumbel(runtime, 123, 40, ids)
    assert got is not None
    assert got.shape == ids.shape
    assert got.dtype == np.float64
    assert np.isfinite(got).all()
    # The law's mean is Euler's constant, its variance π²/6; 40,000 draws put the mean within 0.03.
    assert got.mean() == pytest.approx(0.5772, abs=0.03)
    assert got.var() == pytest.approx(np.pi**2 / 6, abs=0.08)


def test_noise_of_no_tokens_and_of_an_unknown_runtime() -> None:
    empty = np.zeros((0, 21), np.int32)
    for runtime in noise.RUNTIMES:
        got = noise.gumbel(runtime, 1, 1, empty)
        assert got is not None
        assert got.shape == (0, 21)
    assert noise.gumbel("vllm-0.20-v2", 1, 1, empty) is None
    assert noise.gumbel("", 1, 1, empty) is None


def test_noise_accepts_views_that_are_not_contiguous() -> None:
    ids = np.arange(42, dtype=np.int32).reshape(6, 7)
    for runtime in noise.RUNTIMES:
        got, whole = noise.gumbel(runtime, 9, 3, ids[:, ::2]), noise.gumbel(runtime, 9, 3, ids)
        assert got is not None
        assert whole is not None
        assert (got == whole[:, ::2]).all()
