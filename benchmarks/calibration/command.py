"""`countersign calibrate`: measures how far an honest backend's claims lie from the reference's replay.

It asks backends marked `trusted` through the proxy's own code (prepare, tap), replays the answers on the reference
the settings name, exactly as a worker would, and fits the null distributions to what it saw. Arms are the backends
(name several that run on other machines or with other kernels), requests in flight, temperatures and truncations;
lengths and kinds of prompt take turns within each.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.calibration import prompts, report
from benchmarks.calibration.archive import Archive
from benchmarks.calibration.arguments import parser
from benchmarks.calibration.errors import CalibrationError
from benchmarks.calibration.fitting import DECLARED, Measured, fit_profile
from benchmarks.calibration.measuring import Course, Measurement, again
from benchmarks.calibration.plan import Plan
from benchmarks.calibration.replaying import Way, ways
from benchmarks.calibration.servers import Target, choose
from policies.errors import ProfileError, SettingsError
from policies.profile import Profile
from verifier_pool.profile_command import write_atomically
from verifier_pool.profiles import read_key, sign
from verifier_pool.reference import open_reference
from verifier_pool.runtime import read_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write a profile; returns 0. Raises SettingsError, CalibrationError and ProfileError."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser(__doc__).parse_args(words)
    key = _key(arguments.sign) if arguments.sign else None  # before an hour of measuring, not after it
    if arguments.source:
        measured, declared, labels, made = _again(arguments.source)
    else:
        measured, declared, labels, made = _measure(arguments)
    made |= {"countersign": _version(), "arguments": shlex.join(words)}
    profile = fit_profile(measured, declared, made)
    write_atomically(arguments.output, sign(profile, key) if key else profile.to_json())
    _print_result(profile, measured, labels)
    print(f"\nwrote {arguments.output}{', signed' if key else ''}", flush=True)
    return 0


Found = tuple[Measured, dict[str, Any], set[str], dict[str, str]]


def _measure(arguments: argparse.Namespace) -> Found:
    settings = read_settings(arguments.config)
    target = choose(settings, arguments.backend)
    plan, how = _plan(arguments, target), ways(arguments.forms, arguments.replays)
    declared = {name: getattr(target.declared, name) for name in DECLARED}
    made = {"machine": _machine(), "hardware": arguments.hardware}
    archive = None
    if arguments.keep:
        archive = Archive(arguments.keep)
        archive.begin(_manifest(plan, how, declared, target, made))
    assert target.model.reference is not None
    print(f"starting the reference of {target.declared.model}", flush=True)
    reference = open_reference(target.declared.model, target.model.reference)
    measurement = Measurement(target, plan, how, reference, archive=archive, say=_say)
    try:
        asyncio.run(measurement.run())
    finally:
        reference.close()
    return measurement.measured, declared, _labels(plan), made | _course(measurement.course)


def _again(folder: Path) -> Found:
    archive = Archive(folder)
    manifest = archive.manifest()
    try:
        plan = Plan.from_json(manifest["plan"])
        declared = {name: str(manifest["declared"][name]) for name in DECLARED}
        made = {str(name): str(value) for name, value in manifest["made"].items()}
        eos_token_ids = tuple(int(token) for token in manifest["eos_token_ids"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CalibrationError(f"{folder} holds no kept calibration: its manifest lacks {error}") from error
    measured, missing = again(archive, plan, eos_token_ids)
    if missing:
        _say(f"note: {missing} of {len(plan.shots())} answers or their replays are not in {folder}")
    return measured, declared, _labels(plan), made


def _plan(arguments: argparse.Namespace, target: Target) -> Plan:
    plan = Plan(
        backends=tuple(backend.name for backend in target.backends),
        requests=arguments.requests,
        concurrency=arguments.concurrency,
        temperatures=arguments.temperatures,
        lengths=arguments.lengths,
        kinds=arguments.kinds,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        words=arguments.words,
        apart=arguments.kinds_apart,
    )
    arms = len(plan.arms(""))
    if plan.requests < plan.fewest:
        raise SettingsError("--requests", f"at least {plan.fewest}, so that each of {arms} arms can be fitted")
    longest = target.model.max_model_len
    # Three tokens for two words is ample for the plain words of the prompts.
    if longest is not None and plan.words * 3 // 2 + max(plan.lengths) > longest:
        raise SettingsError("--words", f"few enough that prompt and answer fit the model's {longest} tokens")
    return plan


def _manifest(
    plan: Plan, how: Sequence[Way], declared: dict[str, Any], target: Target, made: dict[str, str]
) -> dict[str, Any]:
    return {
        "plan": plan.as_json(),
        "prompts": prompts.fingerprint(),
        "ways": [way.name for way in how],
        "declared": declared,
        "eos_token_ids": target.model.eos_token_ids,
        "made": made,
    }


def _print_result(profile: Profile, measured: Measured, labels: set[str]) -> None:
    print(f"\n{report.summary(profile, measured)}", flush=True)
    for warning in report.warnings(profile, measured, labels):
        print(f"\nwarning: {warning}", flush=True)


def _course(course: Course) -> dict[str, str]:
    said = ", ".join(f"{name} {version or 'unknown'}" for name, version in course.versions.items())
    failed = "; ".join(f"{name}: {words}" for name, found in course.failures.items() if (words := found.words()))
    if failed:
        print(f"note: {failed}", flush=True)
    return {"versions": said, "failures": failed or "none"}


def _labels(plan: Plan) -> set[str]:
    return {shot.label for shot in plan.shots()}


def _key(path: Path) -> Any:
    try:
        return read_key(path)
    except OSError as error:
        raise SettingsError("--sign", f"a readable file, not {str(path)!r} ({error.strerror})") from error
    except ProfileError as error:
        raise SettingsError("--sign", f"a key made by `countersign profile keygen` ({error})") from error


def _say(text: str) -> None:
    print(text, flush=True)


def _version() -> str:
    try:
        return metadata.version("countersign")
    except metadata.PackageNotFoundError:
        return "unknown"


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
