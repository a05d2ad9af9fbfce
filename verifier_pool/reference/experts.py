"""Expert ids that a reference returns with a replay."""

from __future__ import annotations

import base64
import binascii
import io
from typing import cast

import numpy as np
from numpy.typing import NDArray

from policies.errors import ReplayError

Experts = NDArray[np.integer]


def decode_npy(text: str) -> NDArray[np.generic]:
    """An array that vLLM sent as base64 of a `.npy` file.

    Raises:
        ReplayError: `bad_replay` when it is none.
    """
    try:
        array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise ReplayError("bad_replay", "an array cannot be read") from error
    if not isinstance(array, np.ndarray):
        raise ReplayError("bad_replay", "an array cannot be read")
    return array


def output_part(experts: NDArray[np.generic] | None, prompt: int, output: int) -> Experts | None:
    """The rows of the tokens fed after the prompt, (G−1, layers, experts per token).

    Args:
        experts: of a prefill of P + G tokens and one more: row r is the token at position r, or P + r where the
            prompt's rows were not asked for. The last output token has a row here but none at the backend, which
            never fed it forward.

    Raises:
        ReplayError: `bad_replay` for another shape, or no integers.
    """
    if experts is None:
        return None
    if (
        experts.ndim != 3
        or not np.issubdtype(experts.dtype, np.integer)
        or len(experts) not in (prompt + output, output)
    ):
        raise ReplayError("bad_replay", f"expert ids of shape {experts.shape} and dtype {experts.dtype}")
    start = prompt if len(experts) == prompt + output else 0
    return cast(Experts, experts[start : start + output - 1])
