"""`countersign noise`: which sampling noise a backend draws by, and what its answers said of the declared one.

detect   asks a backend marked `trusted` for short seeded answers and tries every known noise on them
status   declared runtimes that a backend's answers contradicted
accept   takes a backend's declarations at their word again
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence

from redis import Redis
from redis.exceptions import RedisError

from benchmarks.noise import detect
from policies.errors import SettingsError, StoreUnavailable
from policies.settings import BackendSettings, Settings
from verifier_pool import declarations
from verifier_pool.link import durable, overlays, trail
from verifier_pool.runtime import ANSWER_SECONDS, connect, read_settings
from verifier_pool.standing import Standings

FEWEST = 3
"""Answers, so that every kind of seed is tried."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns its exit code. Raises SettingsError, AskError and StoreUnavailable."""
    arguments = _parser().parse_args(argv)
    settings = read_settings(arguments.config)
    if arguments.command == "detect":
        return _detect(settings, arguments.backend, arguments.answers)
    return _status(settings) if arguments.command == "status" else _accept(settings, arguments.backend)


def _detect(settings: Settings, name: str, count: int) -> int:
    backend = _backend(settings, name, "--backend")
    if not backend.trusted:
        raise SettingsError(f"backends.{name}.trusted", "true, for a backend whose answers may be learned from")
    model = settings.models[backend.model]
    print(f"asking {name} for {count} answers of {detect.TOKENS} tokens at T = 1", flush=True)
    rows = detect.findings(detect.answers(backend, model, count), model)
    print(detect.table(rows))
    if backend.speculative:
        print("\nThis backend is declared speculative: its tokens need fit no noise at T > 0.")
    fitting = [row.runtime for row in rows if row.verdict == "fits"]
    if not fitting:
        undecided = any(row.verdict == "undecided" for row in rows)
        hint = "Too few tokens to tell: ask for more answers." if undecided else "No known noise fits."
        print(f"\n{hint} With any runtime declared, selection will be inconclusive at T > 0.")
        return 1
    # The chance of two fitting is that of one fitting by accident.
    state = "as declared" if backend.runtime == fitting[0] else f"now {backend.runtime or 'undeclared'!r}"
    print(f"\nIn countersign.yaml, under backends, {name} ({state}):\n    runtime: {fitting[0]}")
    return 0


def _status(settings: Settings) -> int:
    with _store(settings) as redis:
        counted = declarations.counted(redis)
        for backend in overlays.effective(redis, settings).settings.backends:
            for runtime, entry in sorted(declarations.entries(redis, backend.name).items()):
                at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(entry["at"]))
                state = "expired" if runtime == backend.runtime else "no longer declared"
                print(f"{backend.name}  {runtime}  {state} since {at}: answer {entry['id']} fits {entry['fits']}")
            if backend.name in counted:
                print(f"{backend.name}  answers that fitted another runtime: {counted[backend.name]}")
    return 0


def _accept(settings: Settings, name: str) -> int:
    with _store(settings) as redis:
        settings = overlays.effective(redis, settings).settings
        backend = _backend(settings, name, "BACKEND")
        actor, most = trail.terminal_actor(), settings.admin.audit_entries
        accepted = declarations.accept(redis, name, settings.durability, actor, most)
        with contextlib.suppress(ValueError):  # a record that cannot be read is the workers' matter, who say so
            Standings(redis, settings).fold(name)
    if accepted:
        print(f"{name}: taken at its word again for {', '.join(accepted)} (declared: {backend.runtime or 'nothing'})")
    else:
        print(f"{name}: no declaration of its had expired")
    return 0


@contextlib.contextmanager
def _store(settings: Settings) -> Iterator[Redis]:
    patience = ANSWER_SECONDS + durable.seconds(settings.durability)
    with contextlib.closing(connect(settings, timeout=patience)) as redis:
        try:
            yield redis
        except RedisError as error:
            raise StoreUnavailable(f"Redis: {type(error).__name__}") from error


def _backend(settings: Settings, name: str, key: str) -> BackendSettings:
    try:
        return settings.backend(name)
    except KeyError:
        known = ", ".join(backend.name for backend in settings.backends)
        raise SettingsError(key, f"one of {known or 'the backends, of which there is none'}") from None


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign noise", description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True)
    found = commands.add_parser("detect", help="which known noise a trusted backend draws by; exit code 1 when none")
    found.add_argument("--backend", required=True, metavar="NAME", help="a backend marked `trusted: true`")
    found.add_argument("--answers", type=_count, default=9, metavar="N", help="short answers to ask for (default 9)")
    commands.add_parser("status", help="declared runtimes that answers contradicted")
    accept = commands.add_parser("accept", help="take a backend's declared runtime at its word again")
    accept.add_argument("backend", metavar="BACKEND")
    for command in commands.choices.values():
        command.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < FEWEST:
        raise argparse.ArgumentTypeError(f"at least {FEWEST}, so that every kind of seed is tried")
    return int(text)
