"""`countersign receipts`: what signs receipts, and the log that all of them are in.

Receipts themselves are at `GET /v1/verifications/{id}/receipt`; docs/receipts.md says how anybody checks one.

exit code 0: done     1: Redis did not answer, nothing signs, or no log     2: wrong usage     3: wrong settings
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from redis import Redis

from policies import jws
from policies.errors import ReceiptError
from policies.settings import Settings
from verifier_pool.link import signing, trail
from verifier_pool.link.log import Log
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.signing import signer_of
from verifier_pool.runtime import answering, read_settings
from verifier_pool.terminal import plain, print_lines, table

TIMEOUT = 10.0
"""Seconds that Redis has for an answer."""


def main(argv: Sequence[str]) -> int:
    """Do one thing with keys or the log; returns 0. Raises SettingsError, StoreUnavailable, ReceiptError, SealError."""
    arguments = _parser().parse_args(list(argv))
    if arguments.action == "keygen":
        print_lines(_keygen())
        return 0
    settings = read_settings(arguments.config)
    with answering(settings, TIMEOUT) as redis:
        rotate = _forget if getattr(arguments, "forget", False) else _rotate
        revoke = partial(_revoke, kid=getattr(arguments, "kid", ""))
        actions: dict[str, Callable[[Redis, Settings], dict[str, Any]]] = {
            "keys": _keys,
            "rotate": rotate,
            "revoke": revoke,
            "log": _log,
            "begin": _begin,
        }
        done = actions[arguments.action](redis, settings)
    print_lines([json.dumps(done["json"])] if arguments.json else done["lines"])
    return 0


def _keygen() -> list[str]:
    key = jws.new_key()
    public = jws.public_bytes(key)
    return [
        "# Keep the first secret: whoever has it can sign in your name. Give it to the proxy and every worker.",
        f"COUNTERSIGN_RECEIPTS__SIGNING_KEYS={jws.key_text(key.private_bytes_raw())}",
        f"# its public key, for receipts.public_keys once it signs no more: {jws.key_text(public)}",
        f"# its kid: {jws.kid_of(public)}",
    ]


def _keys(redis: Redis, settings: Settings) -> dict[str, Any]:
    signer = signer_of(redis, settings)
    token, _ = signer.sign(b"{}", "countersign-nothing")
    signing_now = jws.kid_in(token, "countersign-nothing")
    where = "the settings" if signer.configured else "Redis"
    kids = [jws.kid_of(public) for public in signer.published()]
    rows = [("kid", "")] + [(kid, "signs" if kid == signing_now else "published") for kid in kids]
    found = [{"kid": kid, "signs": kid == signing_now} for kid in kids]
    return {"json": {"from": where, "keys": found}, "lines": [f"keys from {where}", *table(rows, 10_000, indent="")]}


def _rotate(redis: Redis, settings: Settings) -> dict[str, Any]:
    signer = signer_of(redis, settings)
    if signer.configured:
        raise ReceiptError(
            "receipts.signing_keys says what signs: add one (`countersign receipts keygen`) behind the present one in "
            "every process, then put it first; once nothing signs with the old one, its public key goes to "
            "receipts.public_keys"
        )
    signer.published()  # there is one to rotate from
    kid, since = signing.rotate(redis, Sealer.of(settings.storage))
    trail.append(redis, settings.admin.audit_entries, trail.entry(trail.terminal_actor(), "receipts.rotate", kid))
    at = time.strftime("%H:%M:%S", time.gmtime(since))
    return {"json": {"kid": kid, "since": since}, "lines": [f"{kid} is published, and signs from {at} UTC on"]}


def _forget(redis: Redis, settings: Settings) -> dict[str, Any]:
    if signer_of(redis, settings).configured:
        raise ReceiptError("receipts.signing_keys says what signs; nothing in Redis does")
    kid, lost = signing.replace_lost(redis, Sealer.of(settings.storage))
    entry = trail.entry(trail.terminal_actor(), "receipts.rotate", kid, after={"given_up": lost})
    trail.append(redis, settings.admin.audit_entries, entry)
    lines = [f"{kid} signs from now on", *(f"{each} signs no more, and stays published" for each in lost)]
    return {"json": {"kid": kid, "given_up": lost}, "lines": lines}


def _revoke(redis: Redis, settings: Settings, *, kid: str) -> dict[str, Any]:
    if signer_of(redis, settings).configured:
        raise ReceiptError(
            "receipts.signing_keys says what signs: take the key out there in every process, and out of public_keys"
        )
    instead = signing.revoke(redis, kid, Sealer.of(settings.storage))
    entry = trail.entry(trail.terminal_actor(), "receipts.revoke", kid, after={"instead": instead})
    trail.append(redis, settings.admin.audit_entries, entry)
    lines = [f"{plain(kid)} is published no more; what it signed is worth nothing"]
    lines += [f"{instead} signs from now on"] if instead else []
    return {"json": {"kid": kid, "instead": instead or None}, "lines": lines}


def _log(redis: Redis, settings: Settings) -> dict[str, Any]:
    log = Log(redis, signer_of(redis, settings), settings.durability)
    head = log.head()
    if head is None:
        return {"json": None, "lines": ["nothing is in the log yet"]}
    now = log.state()
    said = {"log": now.log, "size": head.size, "root": log.root(head.size).hex(), "head": head.token}
    return {"json": said, "lines": [f"{name}  {plain(str(value))}" for name, value in said.items()]}


def _begin(redis: Redis, settings: Settings) -> dict[str, Any]:
    before, after = Log(redis, signer_of(redis, settings), settings.durability).begin()
    trail.append(redis, settings.admin.audit_entries, trail.entry(trail.terminal_actor(), "receipts.begin", after))
    said = {"before": before, "log": after}
    return {"json": said, "lines": [f"{after} is another log, of the same receipts; heads of {before} end here"]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="countersign receipts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("keygen", help="make a key that signs receipts, and print it with its public part")
    for name, what in (
        ("keys", "which keys sign and are published"),
        ("rotate", "make a new key in Redis, which signs once everybody can know it"),
        (
            "revoke",
            "publish a key in Redis no more, as one that was stolen: nothing that it signed counts then",
        ),
        ("log", "sign a head of the log as it is now, and show it"),
        ("begin", "begin another log, where Redis was set back: heads of the old one would be contradicted"),
    ):
        action = actions.add_parser(name, help=what)
        action.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
        action.add_argument("--json", action="store_true", help="JSON instead of a table")
        if name == "revoke":
            action.add_argument("kid", metavar="KID", help="the key's thumbprint, as `keys` shows it")
        if name == "rotate":
            action.add_argument(
                "--forget",
                action="store_true",
                help="at once, and give up the keys that storage.encryption_keys cannot decrypt any more",
            )
    return parser
