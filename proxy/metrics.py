"""What the proxy counts, read by Prometheus at `/metrics` and sent by OTLP. docs/metrics.md has all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from policies.evidence import Evidence
from policies.settings import Settings
from proxy.backends.group import Group
from proxy.conventions import PROVIDER, operation_of
from proxy.generation import Generation
from proxy.outage import Outage
from proxy.relay.clock import Clock
from proxy.tap.bill import believed
from proxy.watching import watch
from verifier_pool.link import exposition
from verifier_pool.link.fleet import Fleet
from verifier_pool.link.meters import DURATION, FAST, Family, Meters
from verifier_pool.link.otlp import Sender
from verifier_pool.link.processes import watch_process
from verifier_pool.link.telemetry.resource import resource_of

CONTENT_TYPE = exposition.CONTENT_TYPE
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4.0**n for n in range(14))
_REJECTED_STATUS = 200
"""What the backend answered with, who knows it."""
_STATUSES = frozenset({200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431, 499, 500, 501, 502, 503, 504})
"""Statuses that have a label of their own. Any other one is a backend's to choose, and told as `4xx` or `5xx`."""
_GENAI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")


class Metrics:
    """Labels are names the operator chose and words of ours, never ids or keys.

    What is thought of backends, what their verdicts say and what waits for one is for admins alone: whoever knows an
    audit rate knows when to cheat, and verdicts tell how many are audited. So does how long clients waited for one, and
    so does what became of rejected answers. Everybody else sees one of these as if its client had got it (`rejected`):
    a backend knows how many it gave, so what is missing would tell.

    requests                 relayed requests by model, backend and the status the client got
    unrecorded               generations whose evidence could not be queued, by reason and backend
    dropped                  generations without any record: too many at once, while Redis was away
    asked_another            backends that failed a request which another one was then asked for, by why
    probes                   background probes by backend and what they found
    queue_wait               seconds that requests stood in the queue of a model whose backends were all at their limit
    refused                  requests that were not let in, by reason: a limit of their key, or the key itself
    unlimited                requests of limited keys that were let in uncounted, because Redis was away
    reloads                  times that changed settings were read here, by `result`: `applied` or `invalid`
    settings_valid           1 unless the settings file cannot be used as it is now; what it said before then holds
    admin_refused            requests that the admin API refused, by `reason`: no valid key, or too many without one
    _retried                 rejected answers for which another backend was asked, by model and backend
    _blocked                 rejected answers that their clients did not get, and no other one either
    inline_wait              seconds a client waited for its inline verdict
    stored                   seconds that Redis took to acknowledge an intent
    """

    def __init__(self) -> None:
        self._public, self._private = Meters(), Meters()
        self._fleet: Fleet | None = None
        self._sender: Sender | None = None
        self._outage: Outage | None = None
        public, private = self._public, self._private
        by_backend = ("model", "backend")
        self.requests = public.counter("countersign.requests", "{request}", "Relayed requests", (*by_backend, "status"))
        self.unrecorded = public.counter(
            "countersign.unrecorded", "{generation}", "Generations without queued evidence", ("reason", "backend")
        )
        self.dropped = public.counter(
            "countersign.dropped", "{generation}", "Generations without any record, too many during an outage of Redis"
        )
        self.refused = public.counter("countersign.refused", "{request}", "Requests that were not let in", ["reason"])
        self.unlimited = public.counter("countersign.unlimited", "{request}", "Requests let in without their limits")
        self.reloads = public.counter("countersign.settings.reloads", "{event}", "Changed settings read", ["result"])
        self.settings_valid = public.gauge("countersign.settings.valid", "1", "Whether the settings file can be used")
        self.settings_valid.set(1)
        self.admin_refused = public.counter(
            "countersign.admin.refused", "{request}", "Admin requests without a key", ["reason"]
        )
        self.asked_another = public.counter(
            "countersign.asked_another", "{request}", "Requests that went on elsewhere", (*by_backend, "reason")
        )
        self.queue_wait = public.histogram(
            "countersign.queue_wait.duration",
            "s",
            "Time a request waited because every backend was at its limit",
            ["model"],
            bounds=FAST,
        )
        self._overhead = public.histogram(
            "countersign.overhead.duration",
            "s",
            "Time the proxy itself took: total, less waiting for backend, client and verdict",
            ["endpoint"],
            bounds=FAST,
        )
        self._first_overhead = public.histogram(
            "countersign.overhead.first_token.duration",
            "s",
            "Time the proxy itself took until the answer's first bytes went to the client",
            ["endpoint"],
            bounds=FAST,
        )
        self.stored = public.histogram(
            "countersign.store.duration", "s", "Time Redis took to acknowledge an intent", bounds=FAST
        )
        self._conventions(public, private)
        self.inline_wait = private.histogram(
            "countersign.inline_wait.duration", "s", "Time a client waited for its inline verdict", bounds=DURATION
        )
        self._retried = private.counter(
            "countersign.retried", "{request}", "Rejected answers asked for again elsewhere", by_backend
        )
        self._blocked = private.counter(
            "countersign.blocked", "{request}", "Rejected answers in whose place clients got an error", by_backend
        )
        self.probes = private.counter(
            "countersign.backend.probes", "{probe}", "Background probes", ("backend", "result")
        )
        self._backlog = private.gauge(
            "countersign.backlog", "{generation}", "Generations that wait for their verdict", ["backend"]
        )
        self._held = private.gauge(
            "countersign.backlog.size", "By", "Bytes of Redis that wait for verdicts", ["backend"]
        )
        watch_process(public, "proxy")

    def _conventions(self, public: Meters, private: Meters) -> None:
        """OpenTelemetry's own: as the clients' server, and as the backends' client. What holds the time that clients
        waited for verdicts is private."""
        served, asked = (*_GENAI, "error.type"), (*_GENAI, "backend", "error.type")
        self._duration = private.histogram(
            "gen_ai.server.request.duration", "s", "Time to the last byte of the answer", served, bounds=DURATION
        )
        self._first_token = private.histogram(
            "gen_ai.server.time_to_first_token", "s", "Time to the answer's first bytes", _GENAI, bounds=_FIRST_TOKEN
        )
        self._per_token = public.histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per token of a stream after the first; of several choices, the longest's",
            _GENAI,
            bounds=_PER_TOKEN,
        )
        self._operation = public.histogram(
            "gen_ai.client.operation.duration", "s", "Time until a backend's last byte", asked, bounds=DURATION
        )
        self._first_chunk = public.histogram(
            "gen_ai.client.operation.time_to_first_chunk",
            "s",
            "Time until a backend began its answer",
            (*_GENAI, "backend"),
            bounds=_FIRST_TOKEN,
        )
        self._tokens = public.histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens of prompts and of answers, counted by us, else as billed",
            (*_GENAI, "backend", "gen_ai.token.type"),
            bounds=_TOKENS,
        )

    def served(
        self, generation: Generation, clock: Clock, status: int, used: tuple[int | None, int | None] | None
    ) -> None:
        """A request is over.

        Args:
            status: what its client got.
            used: tokens of the prompt and of the answer, as far as they are known; None where there was none, and where
                `counted` will say it.
        """
        told = status if status in _STATUSES else f"{status // 100}xx"
        self.requests.add(1, {"model": generation.model, "backend": generation.backend or "none", "status": told})
        endpoint = {"endpoint": generation.endpoint}
        self._overhead.record(clock.overhead, endpoint)
        error = str(told) if status >= 400 else ""
        genai = _genai(generation) | {"error.type": error}
        self._duration.record(clock.elapsed, genai)
        if clock.total is not None:
            self._operation.record(clock.total, genai)
        if clock.first_token is not None:
            self._first_chunk.record(clock.first_token, genai)
        if used is not None:
            self._use(genai, *used)
        if clock.shown is not None and not error:
            self._first_overhead.record(clock.shown_overhead, endpoint)
            self._first_token.record(clock.shown, genai)

    def rejected(self, generation: Generation, clock: Clock, *, again: bool) -> None:
        """Its verdict keeps an answer from its client, for whom another backend is asked `again`, or who is told."""
        (self._retried if again else self._blocked).add(
            1, {"model": generation.model, "backend": generation.backend or "none"}
        )
        clock.showing()
        self.served(generation, clock, _REJECTED_STATUS, None)

    def counted(self, generation: Generation, choices: Sequence[Evidence]) -> None:
        """What an answer took, once its evidence is read, which is nothing for the event loop."""
        genai, first = _genai(generation), choices[0]
        answer = sum(len(choice.output_ids) for choice in choices)
        if (usage := first.usage) is not None:
            self._use(genai, usage.counted_prompt_tokens or usage.prompt_tokens, answer or usage.completion_tokens)
        else:
            self._use(genai, len(first.prompt_ids) or None, answer or None)
        if not generation.stream or first.first_token_seconds is None or first.total_seconds is None:
            return
        longest = max(len(choice.output_ids) for choice in choices)
        if first.complete and longest > 1:
            self._per_token.record((first.total_seconds - first.first_token_seconds) / (longest - 1), genai)

    def _use(self, genai: Mapping[str, str], prompt: int | None, answer: int | None) -> None:
        for kind, tokens in (("input", prompt), ("output", answer)):
            if tokens is not None:
                self._tokens.record(believed(tokens), {**genai, "gen_ai.token.type": kind})

    def passed_over(self, generation: Generation, reason: str) -> None:
        """The backend of this generation failed it, and another one is asked."""
        labels = {"model": generation.model, "backend": generation.backend, "reason": reason}
        self.asked_another.add(1, labels)

    def waits(self, generations: Mapping[str, int], held: Mapping[str, int]) -> None:
        """How many generations of which backend wait for their verdict, and how many bytes of Redis with them, as it
        was when an answer was last recorded here. Of other backends nothing waits any more."""
        for gauge, counts in ((self._backlog, generations), (self._held, held)):
            gauge.replace((count, {"backend": backend}) for backend, count in counts.items())

    def count_flights(self, in_flight: Callable[[], int]) -> None:
        """Show how many requests are being served, whenever somebody looks."""
        self._public.observe(
            "countersign.in_flight", "{request}", "Requests being served", (), lambda: [(in_flight(), {})]
        )

    def count_unasked(self, unasked: Callable[[], int]) -> None:
        """Show how many connections to backends were closed because more came on them than was asked for."""
        self._public.observe(
            "countersign.unasked",
            "{connection}",
            "Connections closed because a backend sent more than its answer",
            (),
            lambda: [(unasked(), {})],
            "counter",
        )

    def count_unpublished(self, unpublished: Callable[[], int]) -> None:
        """Show how many keys receipts are signed with that this process does not publish."""
        self._public.observe(
            "countersign.receipts.unpublished_keys",
            "{key}",
            "Keys that sign receipts and are not published, so that nobody can check these",
            (),
            lambda: [(unpublished(), {})],
        )

    def watch(self, groups: Callable[[], Sequence[Group]]) -> None:
        """Show standing and health of the backends of these groups, as they are whenever somebody looks."""
        watch(self._private, groups)

    def watch_store(self, outage: Outage) -> None:
        """Show whether Redis answers."""
        self._outage = outage
        self._public.observe(
            "countersign.store.up", "1", "Whether Redis answers", (), lambda: [(int(not outage.down), {})]
        )
        self._public.observe(
            "countersign.store.outages", "{event}", "Outages of Redis", (), lambda: [(outage.count, {})], "counter"
        )

    def start(self, redis_url: str, settings: Settings) -> None:
        """Show what Redis holds of all proxies and workers, and begin to send, where the settings want it. Raises
        SettingsError where that cannot work."""
        self._fleet = Fleet(redis_url, settings)
        if settings.metrics.otlp:
            who = resource_of(settings.telemetry, "proxy")
            self._sender = Sender(settings.metrics, lambda: self.read(private=True), who)

    def renew(self, settings: Settings) -> None:
        """Take over other models and backends."""
        if self._fleet is not None:
            self._fleet.renew(settings)

    def read(self, *, private: bool = False) -> list[Family]:
        """All values now; with `private` also what is for admins. Asks Redis, so it is not for the event loop."""
        public = self._public.read()
        if not private:
            return public
        answers = self._fleet is not None and not (self._outage is not None and self._outage.down)
        return [*public, *self._private.read(), *(self._fleet.read() if self._fleet and answers else ())]

    def page(self, *, private: bool = False) -> bytes:
        """The Prometheus text page of `read`."""
        return exposition.page(self.read(private=private))

    def close(self) -> None:
        """Send a last time, and let go of Redis."""
        if self._sender is not None:
            self._sender.close()
        if self._fleet is not None:
            self._fleet.close()


def _genai(generation: Generation) -> dict[str, str]:
    return {
        "gen_ai.operation.name": operation_of(generation.endpoint),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": generation.model,
        "backend": generation.backend or "none",
    }
