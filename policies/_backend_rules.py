"""Sections of the settings about backends: what each is declared to be, which one is asked, and which one is not."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, WithJsonSchema, model_validator

from policies._sections import Section

NO_NAMES = (".", "..", "none", "other")
"""Names that no backend can have: the first two are parts of no URL, the others are labels of ours in metrics."""


def _free(name: str) -> str:
    if name in NO_NAMES:
        raise ValueError(f"a name that is none of {', '.join(NO_NAMES)}")
    return name


def _line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("text on one line, without control or formatting characters")
    return text


Line = Annotated[str, AfterValidator(_line), WithJsonSchema({"type": "string", "pattern": r"^( |[^\p{C}\p{Z}])*$"})]
"""Text that gets into records, labels and logs as it is."""


class BackendSettings(Section):
    """One untrusted server and what it is declared to run.

    Attributes:
        name: what it is called, by nothing else: in metrics, standing and commands.
        url: where it is asked, without `/v1`.
        model: name of the model, as it stands in `models`.
        api_key: what it is asked with; no client ever sees it.
        runtime: key of the sampling noise, such as `vllm-0.32-v2` (GPU) or `vllm-0.32-v1-cpu`; an unknown
            one leaves selection inconclusive at T > 0.
        precision: declared precision, such as `bf16`; part of the profile's key.
        engine: declared engine version, hardware and kernels, such as `vllm 0.32.0, H200, CUDA graphs`; part of the
            profile's key.
        speculative: it decodes speculatively, which draws by other noise at T > 0; selection then falls back to
            tests that need no seed, and its answers never pass there. Its standing goes no higher than `trial`.
        served_model: the model's name at the backend, when it differs.
        routed_experts: what to do with streams on a mixture-of-experts backend, whose streams carry no
            expert ids: `stream` relays them and leaves routing inconclusive, `buffer` asks upstream without
            streaming and streams the finished answer to the client.
        trusted: answers may be used for calibration.
        max_concurrency: requests in flight at once, by each proxy; 0 is unlimited. What happens when all backends of a
            model have as many as they may is `routing.queue`.
        alpha: this backend's `standing.alpha`, where it has one of its own.
        drained: it gets no new requests, only those of an admin who names it; what runs there is finished.
        trace_context: it is told which trace a request belongs to (`traceparent`): the proxy's own where the request is
            traced, else the client's with its `tracestate`. No other backend sees either.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$"), AfterValidator(_free)]
    url: Annotated[str, Field(pattern=r"^https?://[^?#]*$")]
    model: str
    served_model: Line | None = None
    api_key: SecretStr | None = None
    runtime: Line = ""
    precision: Line = ""
    engine: Line = ""
    speculative: bool = False
    routed_experts: Literal["stream", "buffer"] = "stream"
    trusted: bool = False
    max_concurrency: int = Field(0, ge=0)
    alpha: float | None = Field(None, gt=0, le=0.1)
    drained: bool = False
    trace_context: bool = False


class RoutingSettings(Section):
    """Which of a model's backends takes a request. A model may have a section `routing` of its own.

    Attributes:
        policy: `least_outstanding` asks the one with the fewest requests in flight, equal ones in turn. `prefix_hash`
            asks the same one for prompts that begin alike, so that its prefix cache hits: consistent hashing with
            bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018) over rendezvous hashes, under which a backend
            that comes or goes moves no requests but its own.
        prefix_bytes: how much of a prompt's beginning counts as alike, up to its first user message.
        sticky: fields of a request that name its session; the first one there is takes the place of the prompt, for
            each client key by itself.
        load_bound: how many times its share of the requests in flight a backend may have under `prefix_hash` before
            they go to the prompt's next one.
        queue: requests of a model that may wait while all its backends are at their limit; 0 refuses at once.
        queue_seconds: how long each waits before it is refused (503, with `retry-after`).
    """

    policy: Literal["least_outstanding", "prefix_hash"] = "least_outstanding"
    prefix_bytes: int = Field(1024, gt=0, le=65_536)
    sticky: tuple[str, ...] = ("prompt_cache_key", "user")
    load_bound: float = Field(1.25, ge=1, le=1000)
    queue: int = Field(100, ge=0)
    queue_seconds: float = Field(5.0, gt=0, le=300)


class HealthSettings(Section):
    """Background probes: each backend is asked now and then whether it is well. One that is not, is asked for answers
    only while every other backend of its model is out, too. Times are seconds.

    Attributes:
        interval: between two probes of a backend, up to a fifth more or less; 0 is never.
        path: asked with GET. A status of 500 or more, no connection and no answer are failures; everything else, such
            as 404 or 401, says that somebody is there.
        timeout: for everything that one probe asks.
        down_after: failures in a row after which a backend is down.
        up_after: successes in a row after which it is up again.
        models: also ask `/v1/models`; one that lists models and not the backend's `served_model` is a failure.
    """

    interval: float = Field(10.0, ge=0, le=86_400)
    path: Annotated[str, Field(pattern=r"^/[!-~]*$")] = "/health"
    timeout: float = Field(2.0, gt=0, le=60)
    down_after: int = Field(3, gt=0)
    up_after: int = Field(2, gt=0)
    models: bool = False


class BreakerSettings(Section):
    """When a backend that fails requests is left alone. Each proxy keeps its own count. Times are seconds.

    Connections that fail, time-outs, statuses of 500 or more and answers that break off are failures; 4xx, and clients
    that leave, say nothing. A backend that can be reached is still asked while every other one is out, too: what fails
    may be one client's requests. One that cannot, or is silent, is asked only by the one request that tries it.

    Attributes:
        failures: so many in a row open the breaker.
        open_seconds: how long it is open for the first time; twice as long whenever the request that tries it fails.
        longest: the most that this grows to, before up to a quarter of it, by chance, is taken off.
        longest_rest: the most that `retry-after` in a 429 or 503 lets a backend rest, in which the others go first.
    """

    failures: int = Field(5, gt=0)
    open_seconds: float = Field(2.0, gt=0)
    longest: float = Field(60.0, gt=0)
    longest_rest: float = Field(60.0, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> BreakerSettings:
        if self.longest < self.open_seconds:
            raise ValueError("longest must not be shorter than open_seconds")
        return self
