"""Asks and replays everything a plan wants, arm by arm, and keeps it where there is an archive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import aiohttp

from benchmarks.calibration.archive import Archive
from benchmarks.calibration.asking import REQUEST_SECONDS, Asker, Failures, plainly_honest
from benchmarks.calibration.errors import CalibrationError
from benchmarks.calibration.fitting import Measured
from benchmarks.calibration.plan import Plan, Shot
from benchmarks.calibration.progress import Progress, Say
from benchmarks.calibration.replaying import Way, replay
from benchmarks.calibration.servers import Target, check_version, version
from policies.evidence import Evidence, Replay
from verifier_pool.reference.base import Reference


@dataclass(slots=True)
class Course:
    """How measuring went.

    Attributes:
        versions: what each backend says it runs; empty where it says nothing.
        warnings: what the operator should know.
        failures: by backend.
    """

    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    failures: dict[str, Failures] = field(default_factory=dict)


class Measurement:
    """One run over a plan."""

    def __init__(
        self,
        target: Target,
        plan: Plan,
        ways: Sequence[Way],
        reference: Reference,
        *,
        archive: Archive | None = None,
        say: Say = print,
    ) -> None:
        self._target = target
        self._plan = plan
        self._ways = ways
        self._reference = reference
        self._archive = archive
        self._say = say
        self._shots = plan.shots()
        self._progress = Progress(self._shots, say)
        self.course = Course()
        self.measured = Measured(target.model.eos_token_ids)

    async def run(self) -> None:
        """Do all of it.

        Raises:
            SettingsError: a backend runs another version than it is declared to.
            CalibrationError: an answer is not plainly honest, too many fail, or the reference cannot replay one.
        """
        self._count_known()
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await self._check_versions(session)
            for (backend, arm), shots in groupby(self._shots, lambda shot: (shot.arm.backend, shot.arm)):
                self._progress.step(f"{arm.name}: asking")
                answers = await self._ask(session, backend, list(shots))
                self._progress.step(f"{arm.name}: replaying")
                await asyncio.to_thread(self._replay, answers)

    def _count_known(self) -> None:
        known = 0
        for shot in self._shots if self._archive else ():
            assert self._archive is not None
            if self._archive.answer(shot.index) is not None:
                known += 1
                self._progress.known(shot, replayed=self._archive.replays(shot.index) is not None)
        if known:
            self._say(f"{known} of {len(self._shots)} answers were kept by an earlier run")

    async def _check_versions(self, session: aiohttp.ClientSession) -> None:
        for backend in self._target.backends:
            said = await version(session, backend)
            self.course.versions[backend.name] = said
            warning = check_version(backend, said)
            if warning:
                self.course.warnings.append(warning)
                self._say(f"note: {warning}")

    async def _ask(self, session: aiohttp.ClientSession, name: str, shots: list[Shot]) -> list[tuple[Shot, Evidence]]:
        answers: dict[int, tuple[Shot, Evidence]] = {}
        for shot in shots:
            kept = self._archive.answer(shot.index) if self._archive else None
            if kept is not None:
                answers[shot.index] = (shot, kept)

        def keep(shot: Shot, evidence: Evidence) -> None:
            answers[shot.index] = (shot, evidence)
            if self._archive is not None:
                self._archive.keep_answer(shot, evidence)

        asker = Asker(session, self._target.backend(name), self._target.model, words=self._plan.words)
        asker.failures = self.course.failures.setdefault(name, Failures())
        await asker.run([shot for shot in shots if shot.index not in answers], keep, self._progress.asked)
        return [answers[index] for index in sorted(answers)]

    def _replay(self, answers: Sequence[tuple[Shot, Evidence]]) -> None:
        todo: list[tuple[Shot, Evidence]] = []
        for shot, evidence in answers:
            kept = self._archive.replays(shot.index) if self._archive else None
            if kept is None:
                todo.append((shot, evidence))
            else:
                self._take(shot, evidence, kept)
        experts = self._target.model.experts is not None
        only = [evidence for _, evidence in todo]
        for place, replays in replay(self._reference, only, self._ways, experts=experts, tick=self._progress.replayed):
            shot, evidence = todo[place]
            self._take(shot, evidence, replays)
            if self._archive is not None:
                self._archive.keep_replays(shot.index, replays)

    def _take(self, shot: Shot, evidence: Evidence, replays: dict[str, Replay]) -> None:
        for found in replays.values():
            plainly_honest(evidence, self._target.model, found.prompt_ids)
        self.measured.add(shot, evidence, replays.values())


def again(archive: Archive, plan: Plan, eos_token_ids: Sequence[int]) -> tuple[Measured, int]:
    """What an archive holds, without asking; and how many of the plan's answers it lacks.

    Raises:
        CalibrationError: a file cannot be read, or no answer has its replays.
    """
    measured = Measured(eos_token_ids)
    missing = 0
    for shot in plan.shots():
        evidence, replays = archive.answer(shot.index), archive.replays(shot.index)
        if evidence is None or not replays:
            missing += 1
        else:
            measured.add(shot, evidence, replays.values())
    if not measured.answers:
        raise CalibrationError(f"{archive.folder} holds no answer with its replays")
    return measured, missing
