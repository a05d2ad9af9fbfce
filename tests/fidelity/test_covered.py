"""Every one of the 65 cases has a test."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import tests.fidelity


def _marks(function: Any) -> Iterator[pytest.Mark]:
    """A test's marks, those of its parameters' values included."""
    for mark in getattr(function, "pytestmark", []):
        yield mark
        for value in mark.args[1] if mark.name == "parametrize" else ():
            yield from (each.mark for each in getattr(value, "marks", ()))


def test_every_case_has_a_test() -> None:
    covered: set[int] = set()
    for module in pkgutil.iter_modules(tests.fidelity.__path__):
        if not module.name.startswith("test_"):
            continue
        for name, function in vars(importlib.import_module(f"tests.fidelity.{module.name}")).items():
            if name.startswith("test_"):
                covered.update(*(mark.args for mark in _marks(function) if mark.name == "cases"))
    assert covered == set(range(1, 66))
