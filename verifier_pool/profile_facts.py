"""What a profile speaks for, and what it lacks, as admins see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from policies import distance, margin, routing
from policies._cells import EDGES
from policies.profile import Profile
from policies.settings import Settings
from verifier_pool.link.running import profile_field
from verifier_pool.profiles import name_of

_FORMS = ("full", "ids")


def all_facts(
    settings: Settings, profiles: Mapping[str, Profile], second_profiles: Mapping[str, Profile]
) -> dict[str, dict[str, Any]]:
    """Facts of every profile, by `running.profile_field`."""
    found = {}
    for second, read in ((False, profiles), (True, second_profiles)):
        for model, profile in read.items():
            experts = settings.models[model].experts is not None
            found[profile_field(model, second=second)] = facts(profile, experts=experts)
    return found


def facts(profile: Profile, *, experts: bool = False) -> dict[str, Any]:
    """A profile's key, arms and cells in short. `experts`: its model has some, whose routing can be judged."""
    cells = profile.cells
    arms = {
        label: {
            "cells": len(own := [cell for cell in cells if cell.label == label]),
            "answers_least": min(cell.n for cell in own),
            "temperatures": [_band(at) for at in sorted({cell.temperature for cell in own})],
            "longest_from": max(cell.length for cell in own),
        }
        for label in sorted({cell.label for cell in cells})
    }
    return {
        "name": name_of(profile),
        "key": msgspec.structs.asdict(profile.key),
        "created": profile.created,
        "answers": profile.responses,
        "tokens": profile.tokens,
        "delta": profile.delta,
        "arms": arms,
        "mu0": max(cell.mu0 for cell in cells),
        "lacks": lacking(profile, experts=experts),
    }


def lacking(profile: Profile, *, experts: bool = False) -> list[str]:
    """Answers that it cannot judge, in words: a check, a form of replay or temperatures without any cell."""
    checks = [distance.NAME, margin.NAME, *([routing.NAME] if experts else [])]
    found = []
    for check in checks:
        own = [cell for cell in profile.cells if cell.check == check]
        if not own:
            found.append(check)
            continue
        forms = {cell.form for cell in own}
        found += [f"{check} of {form} replays" for form in _FORMS if form not in forms and check != routing.NAME]
        known = {cell.temperature for cell in own}
        found += [f"{check} at temperatures {_band(at)}" for at in range(len(EDGES)) if at not in known]
    return found


def _band(at: int) -> str:
    if at == 0:
        return "0"
    low, high = EDGES[at - 1], EDGES[at]
    return f"over {low:g}" if at == len(EDGES) - 1 else f"{low:g} to {high:g}"
