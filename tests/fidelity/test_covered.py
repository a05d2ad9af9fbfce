"""Every one of the 65 cases has a test."""

from __future__ import annotations

import importlib
import pkgutil

import tests.fidelity


def test_every_case_has_a_test() -> None:
    covered: set[int] = set()
    for module in pkgutil.iter_modules(tests.fidelity.__path__):
        if not module.name.startswith("test_"):
            continue
        for name, function in vars(importlib.import_module(f"tests.fidelity.{module.name}")).items():
            if name.startswith("test_"):
                marks = getattr(function, "pytestmark", [])
                covered.update(*(mark.args for mark in marks if mark.name == "cases"))
    assert covered == set(range(1, 66))
