"""`countersign profile`: makes signing keys; shows, signs and checks profiles. Needs no settings and no engine."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from policies.errors import ProfileError
from verifier_pool.profiles import Opened, new_key, open_profile, read_key, read_profile, sign


def main(argv: Sequence[str]) -> int:
    """Do one thing with a profile or a key; returns 0. Raises ProfileError."""
    arguments = _parser().parse_args(list(argv))
    try:
        text = {"keygen": _keygen, "show": _show, "sign": _sign, "verify": _verify}[arguments.what](arguments)
    except OSError as error:
        raise ProfileError(f"{error.filename or arguments.file}: {error.strerror}") from error
    print(text)
    return 0


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that nobody ever reads half of it; readable by all, as the umask allows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _keygen(arguments: argparse.Namespace) -> str:
    public = new_key(arguments.file)
    return f"wrote {arguments.file} (keep it private). For the settings:\n\nprofile_keys: [{public}]"


def _sign(arguments: argparse.Namespace) -> str:
    key = read_key(arguments.key)
    signed = sign(_open(arguments.file).profile, key)
    target = arguments.output or arguments.file
    write_atomically(target, signed)
    return f"wrote {target}, signed by {open_profile(signed).signer}"


def _verify(arguments: argparse.Namespace) -> str:
    try:
        read_profile(arguments.file, arguments.key)
    except ProfileError as error:
        raise ProfileError(f"{arguments.file}: {error}") from error
    signer = _open(arguments.file).signer
    if signer is None:
        raise ProfileError(f"{arguments.file}: it is not signed")
    return f"{arguments.file}: signed by {signer}"


def _show(arguments: argparse.Namespace) -> str:
    try:
        opened = _open(arguments.file)
    except FileNotFoundError as error:
        running = "what running workers judge a model by, `countersign profiles show MODEL` says"
        raise ProfileError(f"{arguments.file}: {error.strerror}; {running}") from error
    profile = opened.profile
    rows = {**msgspec.structs.asdict(profile.key), "signed by": opened.signer or "nobody"}
    if profile.created:
        rows["created"] = f"{datetime.fromtimestamp(profile.created, UTC):%Y-%m-%d %H:%M} UTC"
    cells = f"{len(profile.cells)}, of {min(cell.n for cell in profile.cells)} answers or more"
    rows |= {"answers": str(profile.responses), "tokens": str(profile.tokens), "cells": cells, **profile.made}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _open(path: Path) -> Opened:
    try:
        return open_profile(path.read_bytes())
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign profile", description=__doc__)
    actions = parser.add_subparsers(dest="what", required=True)
    keygen = actions.add_parser("keygen", help="make a signing key, and print its public part")
    keygen.add_argument("file", type=Path, metavar="FILE", help="new file for the private key (PEM, mode 0600)")
    show = actions.add_parser("show", help="what a profile was measured from")
    show.add_argument("file", type=Path, metavar="FILE", help="a profile")
    signing = actions.add_parser("sign", help="sign a profile, in place")
    signing.add_argument("file", type=Path, metavar="FILE", help="a profile; an old signature is replaced")
    signing.add_argument("--key", type=Path, required=True, metavar="FILE", help="private key, from `keygen`")
    signing.add_argument("--output", type=Path, metavar="FILE", help="write the signed profile there instead")
    verifying = actions.add_parser("verify", help="fails unless the profile is signed and unchanged")
    verifying.add_argument("file", type=Path, metavar="FILE", help="a profile")
    verifying.add_argument("--key", action="append", default=[], metavar="KEY", help="base64 public key to accept")
    return parser
