"""The console script: picks a sub-command and hands over. Each is imported only when asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from policies.errors import CountersignError, SettingsError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("benchmarks.demo.command", "see an honest backend pass and two cheats caught, on this machine"),
    "serve": ("proxy.serve", "run the proxy"),
    "worker": ("verifier_pool.worker", "run a verifier worker"),
    "calibrate": ("benchmarks.calibration.command", "measure a profile on a trusted backend"),
    "keys": ("verifier_pool.keys_command", "make client keys, list and revoke them, and see what they used"),
    "backends": ("verifier_pool.backends_command", "add, change, drain or remove backends while everything runs"),
    "standing": ("verifier_pool.standing_command", "what is known about each backend; quarantine or pardon one"),
    "queue": (
        "verifier_pool.queue_command",
        "what waits for the workers, and what failed for good; queue it anew or drop it",
    ),
    "webhooks": ("verifier_pool.webhooks_command", "where events go, what failed to arrive; send one to try"),
    "profiles": ("verifier_pool.profiles_command", "which profiles running workers judge by, and what each lacks"),
    "reload": ("verifier_pool.reload_command", "have settings and profiles read anew, and see who runs by which"),
    "receipts": ("verifier_pool.receipts_command", "what signs receipts: make keys, rotate them; the log's head"),
    "audit": ("verifier_pool.audit_command", "what admins changed, and who"),
    "profile": ("verifier_pool.profile_command", "files: make signing keys; show, sign and verify a profile"),
    "noise": ("benchmarks.noise.command", "find the sampling noise of a backend, or accept a changed one"),
    "verify": ("verifier_pool.verify", "check an evidence bundle, or judge evidence again, offline"),
    "bench": ("benchmarks.command", "measure what verification costs"),
    "lmcv": ("benchmarks.lmcv.command", "LMCV's offline pipeline: prompts, evidence, replay, verdicts"),
    "attack": ("benchmarks.adversary.command", "run a cheating backend to test against"),
}
SYNONYMS = {"queues": "queue"}
ACTIONS_ELSEWHERE = {
    ("profile", "list"): "profiles",
    ("profile", "reload"): "profiles",
    ("profiles", "keygen"): "profile",
    ("profiles", "sign"): "profile",
    ("profiles", "verify"): "profile",
}
"""What only the other of two commands with almost the same name does; it is asked, then."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    name = SYNONYMS.get(name, name)
    name = ACTIONS_ELSEWHERE.get((name, rest[0]), name) if rest else name
    if name not in COMMANDS:
        print(f"countersign: no command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[name][0]).main(rest))
    except SettingsError as error:
        print(f"countersign {name}: {error}", file=sys.stderr)
        return SettingsError.exit_code
    except CountersignError as error:
        print(f"countersign {name}: {error}", file=sys.stderr)
        return 1


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return f"usage: countersign COMMAND …\n\n{rows}\n\n`countersign COMMAND --help` says more."
