"""The one interface of every reference: token ids in, the model's logprobs for them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.evidence import Endpoint, Ids, Replay, ReplayForm

if TYPE_CHECKING:
    from verifier_pool.reference.canary import Canary


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

    @property
    def tokens(self) -> int:
        """P + G: what one replay costs."""
        return len(self.prompt_ids) + len(self.output_ids)


class Reference(ABC):
    """A trusted engine that replays. Every method may be called from any thread.

    Attributes:
        name: engine, version, model and kernels, as the profile's key spells it.
        max_tokens: prompt and output together that it can replay; None where it does not know (yet). A longer
            replay ends as `too_long`.
        canary: its replays with a known answer, to be mixed into the traffic; None where it has none.
        life: changes with each start of its engine, before the new one takes work, as far as it knows of them. A canary
            says nothing about replays of another life.
    """

    name: str = ""
    max_tokens: int | None = None
    canary: Canary | None = None
    life: int = 0

    @abstractmethod
    def submit(self, request: ReplayRequest) -> Future[Replay]:
        """Begin to replay as one teacher-forced prefill, batched with whatever else is in flight.

        Returns at once. The future raises ReplayError, whose reasons `too_long`, `refused`, `bad_ids`, `bad_request`
        and `nothing_to_replay` are about this request and final; any other may pass, and `engine_failed` means
        that the engine died while it held this replay. Cancelling the future takes the replay out of the engine.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and free its memory; what is in flight fails as `engine_failed`. Safe to call twice."""

    def restart(self) -> None:  # noqa: B027 - a reference without anything to start has nothing to do
        """Close the engine, start it anew and test it before it takes work; what is in flight fails.

        Raises:
            ReplayError: `engine_failed` when it does not start, `self_test` when it computes wrong numbers. The
                next `submit` tries again.
        """

    def replay(self, requests: Sequence[ReplayRequest]) -> list[Replay]:
        """Replay all and wait for them, in order. What is left of them is cancelled when one fails.

        Raises:
            ReplayError: the first one's that failed, in the order of the requests; see `submit`.
        """
        futures = [self.submit(request) for request in requests]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
