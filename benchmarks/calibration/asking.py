"""Requests to one trusted backend, written and read by the proxy's own code."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import orjson

from benchmarks.calibration.errors import CalibrationError
from benchmarks.calibration.plan import Shot
from benchmarks.calibration.prompts import messages
from benchmarks.recordings.asking import evidence_of, headers_for
from policies.checks import Result
from policies.evidence import EXCUSED_FAULTS, Evidence, Ids
from policies.selection import fitting_runtime
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap.prepare import prepare
from proxy.tap.types import Prepared
from verifier_pool.judge import cpu_checks

REQUEST_SECONDS = 600.0
ATTEMPTS = 4
PAUSE_SECONDS = 1.0
"""Before the second attempt; twice as long before each further one."""
MOST_LOST = 0.05
"""Share of a backend's requests that may fail for good; more is a sick backend, and no picture of a healthy one."""

Keep = Callable[[Shot, Evidence], None]


class _Failed(Exception):
    """One attempt came to nothing; the message says how, in few words."""


@dataclass(slots=True)
class Failures:
    """What went wrong by the way.

    Attributes:
        attempts: failed attempts by kind; each was tried again but for those in `lost`.
        lost: requests given up.
    """

    attempts: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)

    def words(self) -> str:
        """A sentence; empty when nothing failed."""
        if not self.attempts:
            return ""
        kinds = ", ".join(f"{count} × {kind}" for kind, count in self.attempts.most_common())
        return f"{self.attempts.total()} attempts failed ({kinds}); {len(self.lost)} requests were given up"


class Asker:
    """Sends the requests of a plan to one backend."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        backend: BackendSettings,
        model: ModelSettings,
        *,
        words: int,
    ) -> None:
        self._session = session
        self._backend = backend
        self._model = model
        self._words = words
        self.failures = Failures()

    async def run(self, shots: Sequence[Shot], keep: Keep, tick: Callable[[Shot], None]) -> None:
        """Ask all, as many at once as their arm says; `keep` gets each answer as it comes.

        Raises:
            CalibrationError: an answer is not plainly honest, or too many requests failed for good.
        """
        most = max(1, int(MOST_LOST * len(shots)))
        waiting = iter(shots)

        async def work() -> None:
            for shot in waiting:
                evidence = await self._ask(shot)
                if evidence is not None:
                    keep(shot, evidence)
                elif len(self.failures.lost) > most:
                    raise CalibrationError(f"{self._backend.name} fails too often: {self.failures.words()}")
                tick(shot)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(shots[0].arm.concurrency if shots else 0, len(shots))):
                    group.create_task(work())
        # Not `except*`: what such a clause raises, Python before 3.11.4 wraps in a group again.
        except ExceptionGroup as errors:
            found, rest = errors.split(CalibrationError)
            if rest is not None or found is None:
                raise
            raise _first(found) from None

    async def _ask(self, shot: Shot) -> Evidence | None:
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                evidence = await self._one(shot)
            except _Failed as failure:
                self.failures.attempts[str(failure)] += 1
                continue
            plainly_honest(evidence, self._model)
            return evidence
        self.failures.lost.append(shot.index)
        return None

    async def _one(self, shot: Shot) -> Evidence:
        prepared = prepare(
            Body.read("chat", self._fields(shot)), self._model, self._backend, seed=secrets.randbelow(2**62)
        )
        headers = headers_for(self._backend)
        url = self._backend.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        start = time.monotonic()
        try:
            async with self._session.post(url, data=prepared.body, headers=headers) as response:
                raw, status, kind = await response.read(), response.status, response.content_type
        except TimeoutError:
            raise _Failed("timeout") from None
        except aiohttp.ClientError as error:
            raise _Failed(type(error).__name__) from error
        if status in (401, 403, 404):
            raise CalibrationError(f"{self._backend.name} answered with status {status}: check its url, key and model")
        if status != 200:
            raise _Failed(f"status {status}")
        return self._read(prepared, raw, kind, time.monotonic() - start)

    def _read(self, prepared: Prepared, raw: bytes, kind: str, seconds: float) -> Evidence:
        choices = evidence_of(prepared, self._backend, raw, status=200, kind=kind, seconds=seconds)
        if len(choices) != 1:
            raise _Failed(f"{len(choices)} choices")
        passing = EXCUSED_FAULTS & set(choices[0].faults)
        if passing or not choices[0].complete:
            raise _Failed(" and ".join(sorted(passing)) or "incomplete")
        return choices[0]

    def _fields(self, shot: Shot) -> bytes:
        arm = shot.arm
        fields = {
            "model": self._backend.model,
            "messages": messages(shot.kind, shot.number, words=self._words),
            "temperature": arm.temperature,
            "max_tokens": shot.max_tokens,
            "stream": shot.stream,
        }
        if arm.top_p < 1:
            fields["top_p"] = arm.top_p
        if arm.top_k > 0:
            fields["top_k"] = arm.top_k
        return orjson.dumps(fields)


def plainly_honest(evidence: Evidence, model: ModelSettings, rendered_prompt: Ids | None = None) -> None:
    """A profile made from answers that fail exact checks would teach the worker to accept cheating.

    Raises:
        CalibrationError: `structure` or `selection` rejects, something is withheld, or the backend samples by another
            runtime than it is declared to have.
    """
    for check in cpu_checks(evidence, model, rendered_prompt):
        if check.result in (Result.REJECT, Result.WITHHELD) or fitting_runtime(check.reason):
            raise CalibrationError(f"{evidence.backend} does not pass {check.name}: {check.reason}")


def _first(group: ExceptionGroup[CalibrationError]) -> CalibrationError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
