"""`countersign profiles`: which profile the workers judge each model by, what it speaks for and what it lacks.

    list          a line per model and reference
    show MODEL    its key, its arms, and which backends it does not speak for
    reload        have every process read its settings and its profiles anew (as `countersign reload`)

What is shown is what running workers say, not what is in a file: `countersign profile show FILE` does that.

exit code 0: done     1: Redis did not answer, or there is no such model, or a process did not follow
          2: wrong usage     3: wrong settings
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from policies.errors import CountersignError
from verifier_pool import reload_command
from verifier_pool.link import overlays, running
from verifier_pool.runtime import answering, read_settings
from verifier_pool.standing_text import moment
from verifier_pool.terminal import plain, print_lines, table

TIMEOUT = 5.0
"""Seconds that Redis has for an answer, twice."""


def main(argv: Sequence[str]) -> int:
    """Show profiles; returns the exit code. Raises SettingsError and CountersignError."""
    arguments = _parser().parse_args(list(argv))
    if arguments.action == "reload":
        return reload_command.main(_forwarded(arguments))
    settings = read_settings(arguments.config)
    with answering(settings, TIMEOUT) as redis:
        found = running.profiles(redis, overlays.effective(redis, settings).settings)
    if arguments.action == "show":
        found = [each for each in found if each["model"] == arguments.model]
        if not found:
            raise CountersignError(f"{plain(arguments.model)}: the settings have no such model")
    if arguments.json:
        print_lines([json.dumps(each) for each in found])
    elif arguments.action == "list":
        print_lines(_lines(found))
    else:
        print_lines([line for each in found for line in ["", *_page(each)]][1:])
    return 0


def _lines(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return ["no models: the settings name none"]
    rows = [("model", "reference", "profile", "answers", "workers", "lacks")]
    rows += [
        (
            plain(each["model"]),
            each["reference"],
            each["profile"]["name"] if each["profile"] else "-",
            f"{each['profile']['answers']:,}" if each["profile"] else "-",
            str(each["workers"]),
            plain("; ".join([*each["lacks"], *_unfit(each)])) or "nothing",
        )
        for each in found
    ]
    return table(rows, 10_000, right=(3, 4), indent="")


def _page(found: dict[str, Any]) -> list[str]:
    rows: dict[str, object] = {"model": found["model"], "reference": found["reference"], "file": found["path"] or "-"}
    profile = found["profile"]
    if profile is not None:
        rows |= {"profile": profile["name"], "measured": f"{moment(profile['created'])} UTC"}
        rows |= {f"key: {name}": value for name, value in profile["key"].items() if value != ""}
        rows |= {"answers": f"{profile['answers']:,}", "largest mu0": f"{profile['mu0']:.3g}"}
    rows["workers"] = f"{found['workers']}" + (", which do not all judge by the same" if found["differ"] else "")
    rows["lacks"] = "; ".join(found["lacks"]) or "nothing"
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {plain(value)}" for name, value in rows.items()]
    lines += [f"does not speak for {plain(line)}" for line in _unfit(found)]
    if profile is not None:
        arms = [("arm", "cells", "answers", "temperatures", "tokens")]
        arms += [
            (
                plain(label or "-"),
                str(arm["cells"]),
                f"{arm['answers_least']} or more",
                ", ".join(arm["temperatures"]),
                f"up to {2 * arm['longest_from'] - 1}",
            )
            for label, arm in profile["arms"].items()
        ]
        lines += ["", *table(arms, 10_000, right=(1,), indent="")]
    return lines


def _unfit(found: dict[str, Any]) -> list[str]:
    return [f"{name}: {why}" for name, why in found["unfit"].items()]


def _forwarded(arguments: argparse.Namespace) -> list[str]:
    given = ["--config", arguments.config] if arguments.config else []
    return given + (["--json"] if arguments.json else [])


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="countersign profiles", description=__doc__, formatter_class=formatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|reload")
    for name, text in {
        "list": "a line per model and reference",
        "show": "everything about one model's",
        "reload": "have settings and profiles read anew",
    }.items():
        action = actions.add_parser(name, help=text, description=text)
        if name == "show":
            action.add_argument("model", metavar="MODEL")
        action.add_argument("--json", action="store_true", help="one line of JSON per profile instead of text")
        action.add_argument("--config", help="settings file (default: $COUNTERSIGN_CONFIG, then ./countersign.yaml)")
    return parser
