"""Relays: servers that run another model than declared, and honest ones that run the declared model in other ways.

What such a server reports is its own, so the relay changes nothing; the server behind it is the cheat, or is not.
"""

from __future__ import annotations

from typing import ClassVar

from benchmarks.adversary.base import Cheat


class Relay(Cheat):
    """Passes everything on as it comes."""

    rewrites = False


class _Weights(Relay):
    generates = "own"
    caught_by: ClassVar[tuple[str, ...]] = ("distance", "margin")


class Fp8(_Weights):
    """Weights in FP8."""

    name = "fp8"
    about = "runs a copy with FP8 weights and reports that copy's own logprobs"


class Int8(_Weights):
    """Weights in int8."""

    name = "int8"
    about = "runs a copy with int8 weights (one scale per output row) and reports that copy's own logprobs"
    caught_by = ()
    limits = "drifts hardly more than honest kernels do: reported, not expected to be caught"


class Int4(_Weights):
    """Weights in four bits."""

    name = "int4"
    about = "runs a copy with 4-bit weights (groups of 32) and reports that copy's own logprobs"


class LayerDropped(_Weights):
    """Fewer layers."""

    name = "layer-dropped"
    about = "runs a copy without two of its middle layers and reports that copy's own logprobs"


class Other(_Weights):
    """Another model."""

    name = "other"
    about = "runs a copy whose weights took a random low-rank update, as a fine-tune leaves them, and reports its own"
    limits = "stands in for a fine-tune or a swapped model; nobody trained it"


class KvFp8(_Weights):
    """A quantised KV cache."""

    name = "kv-fp8"
    about = "runs the true weights with an FP8 KV cache and reports its own logprobs"
    limits = "a server flag (--kv-cache-dtype fp8) that needs a GPU"


class _Honest(Relay):
    honest = True


class Honest(_Honest):
    """The declared backend."""

    name = "honest"
    about = "the declared backend as it is"


class HonestBatch(_Honest):
    """The declared backend under load."""

    name = "honest-batch"
    about = "the declared backend with all requests in flight at once"
    shape = "batch"


class HonestLong(_Honest):
    """The declared backend with long prompts."""

    name = "honest-long"
    about = "the declared backend with long contexts"
    shape = "long"


class HonestChunked(_Honest):
    """Another chunking."""

    name = "honest-chunked"
    about = "the declared model on a server with small --max-num-batched-tokens"
    generates = "own"
    shape = "greedy"
    limits = "asked at T = 0: vLLM 0.32's CPU runner dies of a seeded prompt that it prefills in parts"


class HonestKernel(_Honest):
    """Other kernels."""

    name = "honest-kernel"
    about = "the declared model on other kernels: CUDA graphs, another attention backend, other threads"
    generates = "own"


class HonestSpeculative(_Honest):
    """Speculative decoding, declared."""

    name = "honest-speculative"
    about = "the declared model with lossless speculative decoding (ngram or a draft model), declared as such"
    generates = "own"
    limits = (
        "not on a CPU: vLLM 0.32's n-gram drafts are not lossless there, greedy answers held 13 to 23 of 48 tokens "
        "up to 29 nats under the best, and are rejected"
    )
    speculative = True
