"""Every fenced block of README.md, SECURITY.md and docs/ is run, or held against what it names.

sh, bash, console   run against a stack of the page's own; what `shell.NOT_RUN` lists is looked up instead
python              run with the real `openai` client: all of a page's blocks, in order, as one script
yaml                settings, whole or in part, or values of the chart
json                has the shape of what a running stack takes or gives (`shapes.py`)
text                how commands are called, what one printed, or a drawing that `DRAWN` lists
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs import drawn, pages, shapes, shell, yaml_blocks
from tests.docs.pages import Block
from tests.docs.trial import Trial

SHELL = ("sh", "bash", "console")
WITH_SHELL = [page for page in pages.names() if any(block.language in SHELL for block in pages.blocks(page))]


def runs(page: str) -> bool:
    """Whether anything on a page is run."""
    blocks = pages.blocks(page)
    words = [words for block in blocks if block.language in SHELL for words in shell.commands(block.text)]
    return any(block.language == "python" for block in blocks) or not all(map(shell.why_not_run, words))


def makes_keys(page: str) -> bool:
    """Whether a page makes keys, after which whoever has none is not served."""
    blocks = [block for block in pages.blocks(page) if block.language in SHELL]
    run = [words for block in blocks for words in shell.commands(block.text) if not shell.why_not_run(words)]
    return any(words[:3] == ["countersign", "keys", "create"] for words in run)


RUN = [page for page in pages.names() if runs(page)]
BEFORE = {
    "docs/lmcv.md": "from tests.policies import recorded; evidence, replay = recorded.replayed('single')[30]",
}
"""What a page's Python takes as given."""
SAYS = {"README.md": 1, "docs/sdk.md": 4}
"""How often a page's Python prints a verdict at least. The trial's backends are honest, and mostly pass: one answer in
some hundreds lies far enough out to be inconclusive."""


def ids(block: Block) -> str:
    return block.where


def test_every_language_is_known() -> None:
    known = {*SHELL, "python", "yaml", "json", "text"}
    found = {block.where: block.language for page in pages.names() for block in pages.blocks(page)}
    assert {where: language for where, language in found.items() if language not in known} == {}


@pytest.mark.parametrize("page", [page for page in WITH_SHELL if page not in RUN])
def test_commands_that_are_not_run_name_what_is_there(page: str) -> None:
    for block in pages.blocks(page):
        if block.language in SHELL:
            for words in shell.commands(block.text):
                assert shell.why_not_run(words)
                shell.check(words)


@pytest.mark.parametrize("page", RUN)
def test_commands_and_python_run(page: str, request: pytest.FixtureRequest) -> None:
    stack: Trial = request.getfixturevalue("stack" if makes_keys(page) else "shared")
    script = ""
    for block in pages.blocks(page):
        if block.language in SHELL:
            shell.run(block, stack)
        elif block.language == "python" and not script:
            script = python_of(page, stack)
            said = run_python(script, stack)
            assert len(re.findall(r"\b(?:pass|inconclusive)\b", said)) >= SAYS.get(page, 0), said
            assert "reject" not in said


def python_of(page: str, stack: Trial) -> str:
    """The page's blocks in one, each at its own line, so that a traceback names the line of the page."""
    lines = [BEFORE.get(page, "")]
    for block in pages.blocks(page):
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines))
            lines += stack.replaced(block.text).splitlines()
    return "\n".join(lines) + "\n"


def run_python(script: str, stack: Trial) -> str:
    """Run it; returns what it printed."""
    path = stack.folder / "page.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path)], cwd=stack.folder, env=stack.environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", pages.every_block("yaml"), ids=ids)
def test_yaml_is_settings_or_values(block: Block) -> None:
    yaml_blocks.check(block)


@pytest.mark.parametrize("block", pages.every_block("json"), ids=ids)
def test_json_has_a_known_shape(block: Block) -> None:
    shapes.kind_of(block)


def test_json_is_what_a_running_stack_takes_and_gives(stack: Trial) -> None:
    with shapes.Live(stack) as live:
        # Before a block makes a key, which shuts this machine out.
        honest, cheating = (given["verdict"] for given in live.verifications)
        assert honest in ("pass", "inconclusive")
        assert cheating == "reject"
        assert len(live.receipts) == 2
        for block in pages.every_block("json"):
            shapes.compare(block, live)


@pytest.mark.parametrize("block", pages.every_block("text"), ids=ids)
def test_text_is_accounted_for(block: Block) -> None:
    if shell.is_usage(block):
        for words in shell.commands(block.text):
            shell.check(words)
        return
    drawn.check(block)
