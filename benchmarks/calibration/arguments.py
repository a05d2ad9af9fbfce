"""The arguments of `countersign calibrate`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.calibration.prompts import KINDS, LONG_WORDS
from benchmarks.calibration.replaying import BATCHES, FORMS

REQUESTS = 240
LENGTHS = (32, 64, 128)
CONCURRENCY = (1, 8)
TEMPERATURES = (0.0, 0.7, 1.0)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Reads the command line; wrong values end with exit code 2 and a line that says what was expected."""
    parser = argparse.ArgumentParser(prog="countersign calibrate", description=description)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="profile to write, JSON")
    add("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="a backend marked `trusted: true`; may be given several times",
    )
    source.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="ask nothing; fit what an earlier --keep holds"
    )
    add("--keep", type=Path, metavar="DIR", help="keep answers and replays there; a run broken off continues there")
    add("--sign", type=Path, metavar="FILE", help="sign with this key, from `countersign profile keygen`")
    add("--hardware", default="", metavar="TEXT", help="note about the backends' machines, for the record")
    add("--requests", type=_number, default=REQUESTS, metavar="N", help=f"answers per backend (default {REQUESTS})")
    add(
        "--concurrency",
        type=_several(_number),
        default=CONCURRENCY,
        metavar="N,…",
        help="requests in flight, an arm each (1,8)",
    )
    add(
        "--temperatures",
        type=_several(_temperature),
        default=TEMPERATURES,
        metavar="T,…",
        help="an arm each (0,0.7,1)",
    )
    add("--top-p", type=_several(_share), default=(), metavar="P,…", help="truncations, an arm each (none)")
    add("--top-k", type=_several(_number), default=(), metavar="K,…", help="truncations, an arm each (none)")
    add(
        "--lengths",
        type=_several(_number),
        default=LENGTHS,
        metavar="N,…",
        help="tokens asked for, in turn (32,64,128)",
    )
    add("--kinds", type=_several(_one_of(KINDS)), default=KINDS, metavar="KIND,…", help=f"prompts ({','.join(KINDS)})")
    add("--kinds-apart", action="store_true", help="each kind of prompt a condition of its own; needs more requests")
    add(
        "--words",
        type=_number,
        default=LONG_WORDS,
        metavar="N",
        help=f"length of the long prompts ({LONG_WORDS} words)",
    )
    add("--forms", type=_several(_one_of(FORMS)), default=FORMS, metavar="FORM,…", help="replay forms (full,ids)")
    add(
        "--replays",
        type=_several(_number),
        default=BATCHES,
        metavar="N,…",
        help="answers replayed at once; the larger score counts (1,4)",
    )
    return parser


def _several(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        found = tuple(read(part.strip()) for part in text.split(","))
        if len(set(found)) != len(found):
            raise argparse.ArgumentTypeError("each value once")
        return found

    return values


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1, not {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    value = _float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"temperatures from 0 to 2, not {text!r}")
    return value


def _share(text: str) -> float:
    value = _float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"numbers between 0 and 1, not {text!r}")
    return value


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"of {', '.join(choices)}, not {text!r}")
        return text

    return read


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
