"""`countersign verify FILE…`: is an answer what it is said to be? Offline, without a network, a GPU or the model.

An evidence bundle (GET /v1/verifications/{id}/evidence) is checked as a third party would: the signature, the hashes,
its place in the operator's log, and whether the evidence, judged again, leads to the very verdict that was signed.
Packed evidence, which nobody signed, is judged again by your own settings. What the numbers of a report mean is in
docs/evidence.md.

exit code  0  a bundle is verified, whatever its verdict; evidence is neither rejected nor withheld
           1  evidence that nobody signed is rejected or withheld
           2  wrong usage       3  wrong settings or keys
           4  unreadable: no bundle and no evidence, cut off, or another spelling
           5  bad signature     6  the key is none that you trust, or you named none
           7  a hash does not fit: request, answer, replay or profile is another one
           8  the verdict cannot be derived from the evidence
           9  not shown to be in the operator's log
          10  changed after it was written (the checksum alone)
          11  contradicts what you pinned: the log forked, or a receipt was written anew

Of several files, the first that is not 0 counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.bundle import MAX_BYTES, is_bundle
from policies.errors import EvidenceError, ReceiptError, SettingsError
from policies.examination import Examination, Outcome, examine
from policies.jws import keys_in
from policies.pins import Pinned, read
from policies.report import page
from policies.report.data import as_json
from policies.report.text import as_lines
from policies.verification import public
from verifier_pool.terminal import plain, print_lines

if TYPE_CHECKING:
    from verifier_pool.verify_evidence import Judging

REJECTED = 1
_ZSTD = b"\x28\xb5\x2f\xfd"
"""How packed evidence begins. Nothing else is worth starting a reference for."""
_PIN = re.compile(r"[A-Za-z0-9_-]{43}")


def main(argv: Sequence[str]) -> int:
    """Check files; returns the exit code, as the module tells them. Raises SettingsError."""
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    if len(arguments.files) > 1 and any((arguments.html, arguments.request, arguments.answer, arguments.consistency)):
        parser.error("--html, --request, --answer and --consistency take one bundle")
    if arguments.consistency and not arguments.pins:
        parser.error("--consistency is about what --pins has")
    pins = None if arguments.pins is None else _pinned(arguments.pins)
    trusted = _trusted(arguments.keys)
    if pins is not None and not trusted:
        trusted = dict(pins.keys)
    code = 0
    with contextlib.ExitStack() as stack:
        judging: Judging | None = None
        for path in arguments.files:
            data = _read(path)
            if data is not None and is_bundle(data):
                found = _bundle(path, data, trusted, pins, arguments)
                code = code or found
                continue
            if data is not None and data.startswith(_ZSTD) and judging is None and not arguments.html:
                from verifier_pool.verify_evidence import Judging

                judging = stack.enter_context(Judging(arguments.config, replay=not arguments.no_replay))
            found = _evidence(path, data, judging, arguments)
            code = code or found
    return code


def _bundle(
    path: Path, data: bytes, trusted: dict[str, bytes], pins: Pinned | None, arguments: argparse.Namespace
) -> int:
    spelling, digest = _tokenizer(arguments.tokenizer)
    found = examine(
        data,
        trusted,
        any_key=arguments.any_key,
        spelling=spelling,
        tokenizer=digest,
        request=_own(arguments.request, "--request"),
        answer=_own(arguments.answer, "--answer"),
        pins=pins,
        growth=_growth(arguments.consistency),
    )
    if arguments.html:
        _write(arguments.html, page(found))
    _show(str(path), found, arguments.json)
    return int(found.outcome)


def _evidence(path: Path, data: bytes | None, judging: Judging | None, arguments: argparse.Namespace) -> int:
    if data is None or judging is None or not data.startswith(_ZSTD):
        why = "cannot be read" if data is None else "neither an evidence bundle nor packed evidence"
        if data is not None and data.startswith(_ZSTD):
            why = "packed evidence, of which there is no page (--html): nobody signed it"
        print(f"{plain(path)}: {why}", file=sys.stderr)
        return int(Outcome.UNREADABLE)
    from verifier_pool.verify_evidence import as_lines as evidence_lines

    try:
        verification = judging.judge(data)
    except EvidenceError as error:
        print(f"{plain(path)}: {plain(error)}", file=sys.stderr)
        return int(Outcome.UNREADABLE)
    print_lines([_json(public(verification))] if arguments.json else evidence_lines(str(path), verification))
    return REJECTED if verification["verdict"] in ("reject", "withheld") else 0


def _show(name: str, found: Examination, as_data: bool) -> None:
    # ASCII alone: no character of an answer reaches a terminal unescaped.
    print_lines(
        [_json({"file": name, **as_json(found)})] if as_data else [plain(each) for each in as_lines(name, found)]
    )


def _json(value: Any) -> str:
    """A value as JSON, in which a number that is none is null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError:
        return None


def _own(path: Path | None, option: str) -> bytes | None:
    data = None if path is None else _read(path)
    if path is not None and data is None:
        raise SettingsError(option, f"a readable file, not {str(path)!r}")
    return data


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise SettingsError("--html", f"a file that can be written, not {str(path)!r} ({error.strerror})") from error


def _trusted(given: Sequence[str]) -> dict[str, bytes]:
    """Keys by `kid`: those of JWK sets, and pins, whose keys are taken from the bundle. Raises SettingsError."""
    found: dict[str, bytes] = {}
    for each in given:
        path = Path(each)
        if not path.exists() and _PIN.fullmatch(each):
            found.setdefault(each, b"")
            continue
        expected = "a file with a JWK set, as /.well-known/countersign-keys.json has it, or a key's thumbprint"
        try:
            keys = keys_in(json.loads(path.read_bytes()))
        except (OSError, ValueError, RecursionError, ReceiptError) as error:
            raise SettingsError("--keys", f"{expected}, not {each!r} ({type(error).__name__})") from error
        if not keys:
            raise SettingsError("--keys", f"{expected}; {each!r} holds no Ed25519 key")
        found |= keys
    return found


def _pinned(path: Path) -> Pinned:
    """What a client remembers. Raises SettingsError."""
    try:
        return read(path.read_bytes())
    except (OSError, ReceiptError) as error:
        expected = f"a file that countersign.client keeps as `pins`, not {str(path)!r} ({type(error).__name__})"
        raise SettingsError("--pins", expected) from error


def _growth(path: Path | None) -> list[bytes] | None:
    """The proof in a file. Raises SettingsError."""
    if path is None:
        return None
    try:
        return [bytes.fromhex(each) for each in json.loads(path.read_bytes())["proof"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        expected = f"what GET /v1/log/consistency answers, not {str(path)!r} ({type(error).__name__})"
        raise SettingsError("--consistency", expected) from error


def _tokenizer(path: Path | None) -> tuple[Any, str]:
    if path is None:
        return None, ""
    from verifier_pool.tokenizer import TokenizerSpelling

    try:
        spelling = TokenizerSpelling.load(path)
    except (OSError, ValueError) as error:
        expected = f"a readable tokenizer.json or its folder, not {str(path)!r}"
        raise SettingsError("--tokenizer", expected) from error
    return spelling, spelling.sha256


def _parser() -> argparse.ArgumentParser:
    text, _, codes = (__doc__ or "").partition("\n\nexit code")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="countersign verify", description=text, epilog="exit code" + codes, formatter_class=form
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="an evidence bundle, or packed evidence")
    parser.add_argument(
        "--keys",
        action="append",
        default=[],
        metavar="FILE|THUMBPRINT",
        help="the operator's keys: a JWK set in a file, or the thumbprint of one key; may be repeated",
    )
    parser.add_argument("--any-key", action="store_true", help="do not ask whose key a bundle is signed with")
    parser.add_argument("--pins", type=Path, metavar="FILE", help="what a client remembers of the log, to compare")
    parser.add_argument(
        "--consistency",
        type=Path,
        metavar="FILE",
        help="the proof that the log continues the pinned one, as /v1/log/consistency gives it",
    )
    parser.add_argument("--request", type=Path, metavar="FILE", help="the request's body as you sent it, to compare")
    parser.add_argument("--answer", type=Path, metavar="FILE", help="the answer's body as you got it, to compare")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="ask this tokenizer, not what it said then")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the bundle as a page there, too")
    parser.add_argument("--json", action="store_true", help="one line of JSON per file")
    parser.add_argument("--config", help="settings for evidence that nobody signed (default: as for other commands)")
    parser.add_argument("--no-replay", action="store_true", help="such evidence: only checks that need no reference")
    return parser
