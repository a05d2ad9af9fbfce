"""Every reason for which a replay may fail is known to coverage, which else blames the backend, and to the page."""

from __future__ import annotations

import ast
from pathlib import Path

from policies import coverage
from verifier_pool.replays import BACKLOG, FAILED

ROOT = Path(__file__).parents[2]


def reasons() -> set[str]:
    found = {BACKLOG, FAILED}
    for path in (ROOT / "verifier_pool").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ReplayError" and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add(first.value.partition(":")[0])
    return found


def test_a_replay_that_fails_is_our_own_fault() -> None:
    found = reasons()
    assert len(found) > 12
    assert {each for each in found if coverage.blame_of(coverage.code_of(each)) != coverage.OURS} == set()


def test_the_page_names_them() -> None:
    page = (ROOT / "docs" / "checks.md").read_text()
    assert sorted(each for each in reasons() if f"`{each}`" not in page and not each.startswith("http_")) == []
