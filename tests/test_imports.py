"""What the proxy shares with the verifier pool hangs on nothing that works."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _imported(path: Path) -> set[str]:
    """Modules that a file of `verifier_pool.link` imports, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name.islower()}
    return names


def test_what_links_proxy_and_workers_imports_neither() -> None:
    """The contract lets the proxy import `verifier_pool.link`; a way round it would lead through there."""
    files = list((ROOT / "verifier_pool" / "link").rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for name in _imported(path):
            room, _, inside = name.partition(".")
            assert room not in {"proxy", "benchmarks", "vllm", "torch"}, (path, name)
            assert room != "verifier_pool" or inside in {"", "link"} or inside.startswith("link."), (path, name)
