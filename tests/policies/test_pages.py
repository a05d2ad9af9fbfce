"""docs/checks.md has every reason and every metric."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from policies import distance, margin, routing, seedfree, selection, structure
from policies.checks import Check
from policies.evidence import EXCUSED_FAULTS, WITHHELD_FAULTS, Evidence, Replay
from tests.policies import recorded
from tests.policies.test_margin import PROFILE
from tests.policies.test_routing import evidence as routed
from tests.policies.test_routing import routes
from verifier_pool.replays import FINAL_REASONS

ROOT = Path(__file__).parents[2]
CHECKS = (ROOT / "docs" / "checks.md").read_text()
CODES_OF_FINDINGS = {"rejected", "withheld", "undecided"}
NAMED = {f"`{name}`" for name in re.findall(r"`([^`]*)`", CHECKS)}


def strings(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every text in a module that is no docstring, and whether it stands where a finding's code does."""
    nodes = list(ast.walk(tree))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {id(node.body[0]) for node in nodes if isinstance(node, documented) and node.body}
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and id(node) in docstrings}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CODES_OF_FINDINGS:
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield str(argument.value), True
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value, False


def codes() -> set[str]:
    """Codes of reasons, read off the checks' source."""
    found = {*EXCUSED_FAULTS, *WITHHELD_FAULTS, *FINAL_REASONS}
    others = {"errors.py", "settings.py", "codec.py", "profile.py", "_admin.py", "_cells.py", "overlay.py"}
    for path in (ROOT / "policies").glob("*.py"):
        if path.name not in others:
            for text, is_code in strings(ast.parse(path.read_text())):
                head = re.match(r"([a-z]\w+): ", text)
                found |= {text} if is_code else {head[1]} if head else set()
    return found


def test_the_page_has_every_reason() -> None:
    found = codes()
    assert len(found) > 50
    assert sorted(code for code in found if f"`{code}`" not in NAMED) == []


def judged() -> Iterator[Check]:
    answer, replay = recorded.replayed("single")[30]
    yield structure.check(answer, eos_token_ids=[recorded.EOS], vocab_size=recorded.VOCABULARY)
    yield selection.check(answer)
    yield seedfree.check(answer, selection.processed(answer, (), None), recorded.VOCABULARY)
    yield distance.check(answer, replay, PROFILE)
    yield margin.check(answer, replay, PROFILE)
    experts = routes(204)
    moe = routed(experts)
    yield routing.check(moe, routed_replay(moe), None)


def routed_replay(answer: Evidence) -> Replay:
    ids = answer.output_ids.reshape(-1, 1)
    return Replay(ids, np.zeros(ids.shape, np.float32), routed_experts=answer.routed_experts)


@pytest.mark.parametrize("check", [*judged()], ids=lambda check: check.name)
def test_the_page_has_every_metric(check: Check) -> None:
    assert len(check.metrics) > 5
    assert sorted(name for name in check.metrics if f"`{name}`" not in NAMED) == []
