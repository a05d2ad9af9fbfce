"""`countersign calibrate`: measures how far an honest backend's claims lie from the reference's replay.

It asks a backend marked `trusted` through the proxy's own code (prepare, tap), replays the answers on the
reference the settings name, exactly as a worker would, and fits the null distributions to what it saw. The arms
are greedy and sampled, one at a time and eight at once, several lengths: honest drift depends on all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from benchmarks.questions import CALIBRATION
from policies import distance
from policies.checks import Result
from policies.errors import CountersignError, SettingsError
from policies.evidence import Evidence, Replay
from policies.profile import FEWEST_RESPONSES, Profile, ProfileKey, fit
from policies.settings import BackendSettings, ModelSettings, Settings
from proxy.tap.factory import open_tap
from proxy.tap.prepare import prepare
from verifier_pool.judge import cpu_checks
from verifier_pool.reference import open_reference
from verifier_pool.reference.base import Reference, ReplayRequest
from verifier_pool.runtime import read_settings

TEMPERATURES = (0.0, 0.8)
LENGTHS = (32, 64, 128)
"""Tokens asked for, in turn; an answer may end sooner by itself."""

BANDS = ("0", "0 to 0.5", "0.5 to 1", "1 to 1.5", "over 1.5")
"""Names of the profile's temperature bands."""

TOGETHER = 8
REPLAYED_TOGETHER = 4
REQUEST_SECONDS = 600.0


class CalibrationError(CountersignError):
    """The backend's answers cannot serve as honest ones; the message says why."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How one group of requests is sent."""

    temperature: float
    together: bool

    @property
    def label(self) -> str:
        """The condition's name in the profile, which keeps temperatures apart by itself."""
        return f"batch{TOGETHER}" if self.together else "single"

    @property
    def name(self) -> str:
        """For people."""
        return f"T={self.temperature:g}, {f'{TOGETHER} at once' if self.together else 'singly'}"


Measured = list[tuple[Arm, Evidence, Replay]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write a profile; returns 0. Raises SettingsError and CalibrationError."""
    arguments = _parser().parse_args(argv)
    settings = read_settings(arguments.config)
    backend, model = _target(settings, arguments.backend)
    assert model.reference is not None
    print(f"starting the reference of {backend.model}", flush=True)
    reference = open_reference(backend.model, model.reference)
    try:
        measured = asyncio.run(_measure(backend, model, reference, arguments))
    finally:
        reference.close()
    profile = fit_profile(measured, backend)
    write_atomically(arguments.output, profile.to_json())
    print(f"\n{summary(profile)}\n\nwrote {arguments.output}", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign calibrate", description=__doc__)
    parser.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    parser.add_argument("--backend", required=True, metavar="NAME", help="a backend marked `trusted: true`")
    parser.add_argument("--requests", type=_count, default=96, metavar="N", help="answers to measure (default 96)")
    parser.add_argument(
        "--lengths", type=_lengths, default=LENGTHS, metavar="N,N,…", help="tokens to ask for, in turn (32,64,128)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="profile to write, JSON")
    return parser


def _count(text: str) -> int:
    fewest = len(arms()) * FEWEST_RESPONSES
    if not text.isdigit() or int(text) < fewest:
        raise argparse.ArgumentTypeError(f"at least {fewest}, so that each of {len(arms())} arms can be fitted")
    return int(text)


def _lengths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError("numbers of tokens, separated by commas")
    return tuple(map(int, parts))


def _target(settings: Settings, name: str) -> tuple[BackendSettings, ModelSettings]:
    try:
        backend = settings.backend(name)
    except KeyError:
        known = ", ".join(backend.name for backend in settings.backends)
        raise SettingsError("--backend", f"one of {known or 'the backends, of which there is none'}") from None
    if not backend.trusted:
        raise SettingsError(f"backends.{name}.trusted", "true, for a backend whose answers define honesty")
    model = settings.models[backend.model]
    if model.reference is None:
        raise SettingsError(f"models.{backend.model}.reference", "an engine that replays")
    return backend, model


def arms() -> list[Arm]:
    """Every combination of temperature and load."""
    return [Arm(temperature, together) for together in (False, True) for temperature in TEMPERATURES]


async def _measure(
    backend: BackendSettings, model: ModelSettings, reference: Reference, arguments: argparse.Namespace
) -> Measured:
    measured: Measured = []
    requests: int = arguments.requests
    shares = [requests // len(arms()) + (index < requests % len(arms())) for index in range(len(arms()))]
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        asker = Asker(session, backend, model, arguments.lengths)
        for arm, share in zip(arms(), shares, strict=True):
            print(f"{arm.name}: {share} answers", flush=True)
            generations = await asker.run(arm, share)
            print(f"{arm.name}: replaying", flush=True)
            replays = await asyncio.to_thread(_replay, reference, generations)
            measured += [(arm, *pair) for pair in zip(generations, replays, strict=True)]
    return measured


class Asker:
    """Sends calibration prompts to one backend and keeps the evidence of the answers."""

    def __init__(
        self, session: aiohttp.ClientSession, backend: BackendSettings, model: ModelSettings, lengths: Sequence[int]
    ) -> None:
        self._session = session
        self._lengths = lengths
        self._backend = backend
        self._model = model
        self._asked = 0

    async def run(self, arm: Arm, count: int) -> list[Evidence]:
        """`count` answers under one arm. Raises CalibrationError for one that is not plainly honest."""
        size = TOGETHER if arm.together else 1
        found: list[Evidence] = []
        while len(found) < count:
            batch = [self._one(arm) for _ in range(min(size, count - len(found)))]
            found += await asyncio.gather(*batch)
        return found

    async def _one(self, arm: Arm) -> Evidence:
        number = self._asked
        self._asked += 1
        fields = {
            "model": self._backend.model,
            "messages": [{"role": "user", "content": CALIBRATION[number % len(CALIBRATION)]}],
            "temperature": arm.temperature,
            "max_tokens": self._lengths[number % len(self._lengths)],
        }
        seed = secrets.randbelow(2**62)
        prepared = prepare("chat", orjson.dumps(fields), self._model, self._backend, seed=seed)
        key = self._backend.api_key
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key.get_secret_value()}"
        url = self._backend.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        try:
            async with self._session.post(url, data=prepared.body, headers=headers) as response:
                raw, status, kind = await response.read(), response.status, response.content_type
        except aiohttp.ClientError as error:
            raise CalibrationError(f"{self._backend.name} cannot be reached: {error}") from error
        tap = open_tap(prepared, self._backend.model, status=status, content_type=kind)
        tap.feed(raw)
        tap.close()
        meta = {"backend": self._backend.name, "model": self._backend.model, "runtime": self._backend.runtime}
        meta |= {"id": secrets.token_hex(16), "precision": self._backend.precision, "engine": self._backend.engine}
        choices = tap.evidence(**meta, request=prepared.body, created=time.time())
        if status != 200 or len(choices) != 1:
            raise CalibrationError(f"{self._backend.name} answered with status {status}")
        _plainly_honest(choices[0], self._model)
        return choices[0]


def _plainly_honest(evidence: Evidence, model: ModelSettings) -> None:
    """A profile made from answers that fail exact checks would teach the worker to accept cheating."""
    for check in cpu_checks(evidence, model):
        if check.result in (Result.REJECT, Result.WITHHELD):
            raise CalibrationError(f"{evidence.backend} does not pass {check.name}: {check.reason}")


def _replay(reference: Reference, generations: Sequence[Evidence]) -> list[Replay]:
    replays: list[Replay] = []
    for start in range(0, len(generations), REPLAYED_TOGETHER):
        batch = generations[start : start + REPLAYED_TOGETHER]
        replays += reference.replay(
            [ReplayRequest(item.prompt_ids, item.output_ids, item.endpoint, item.request) for item in batch]
        )
    return replays


def fit_profile(measured: Measured, backend: BackendSettings) -> Profile:
    """Fit the nulls. Raises ProfileError when too little drifted to fit any."""
    _, _, replay = measured[0]
    key = ProfileKey(
        model=backend.model,
        runtime=backend.runtime,
        precision=backend.precision,
        reference=replay.reference,
        top_k=max(item.claim_ids.shape[1] - 1 for _, item, _ in measured),
        form=replay.form,
    )
    rows = [row for arm, item, replay in measured for row in distance.calibration_rows(item, replay, arm=arm.label)]
    return fit(rows, key, created=time.time())


def summary(profile: Profile) -> str:
    """The fitted arms as a small table: what honest answers show, and how many of them were seen."""
    header = ("arm", "temperature", "drifting tokens", "answers", *(name for name in distance.DECIDING[:3]))
    lines = [header]
    for arm in profile.arms:
        nulls = [arm.nulls.get(name) for name in distance.DECIDING[:3]]
        counts = str(max((null.n for null in nulls if null), default=0))
        cells = [f"{null.quantiles['0.5']:.4f} to {null.quantiles['1.0']:.4f}" if null else "–" for null in nulls]
        lines.append((arm.label, BANDS[arm.temperature], f"from {arm.tokens}", counts, *cells))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    body = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return f"{profile.responses} answers, {profile.tokens} tokens; median to largest of each metric\n{body}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
