"""The one interface of every reference: token ids in, the model's logprobs for them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from policies.evidence import Endpoint, Ids, Replay, ReplayForm


@dataclass(frozen=True, slots=True, eq=False)
class ReplayRequest:
    """One generation to replay. Holds token ids only: the reference never learns the claim.

    Attributes:
        prompt_ids: int32 (P,).
        output_ids: int32 (G,).
        endpoint, request: what the client asked, for the reference's own rendering of the prompt; the JSON
            body as it went to the backend.
        choice: index of the choice, which picks the prompt in a completions request with several.
        candidate_ids: int32 (G, W), the claimed ids of each token, −1 pads; None when only the reference's own
            top-k is wanted.
        form: `full` takes the reference's own top-k too. A reference that cannot score given ids alone answers
            in form `full`.
        experts: also take the expert ids of the output tokens, where the reference captures any.
    """

    prompt_ids: Ids
    output_ids: Ids
    endpoint: Endpoint
    request: bytes
    choice: int = 0
    candidate_ids: Ids | None = None
    form: ReplayForm = "full"
    experts: bool = False


class Reference(Protocol):
    """A trusted engine that replays. Built once per worker; not shared between threads."""

    name: str
    """Engine, version, model and kernels, as the profile's key spells it."""

    def replay(self, requests: Sequence[ReplayRequest]) -> list[Replay]:
        """Replay each request as one teacher-forced prefill, all in one batch.

        Raises:
            ReplayError: the engine is unreachable, refuses, or the sequence is too long.
        """

    def close(self) -> None:
        """Stop the engine and free its memory."""
