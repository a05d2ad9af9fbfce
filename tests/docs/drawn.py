"""`text` blocks that are neither commands nor their output."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, Block

DRAWN = {
    "your app  ": "a drawing of the parts in README.md",
    "policies/ ": "a drawing of the folders, which are looked up",
    "| backend ": "what the demo printed, which benchmarks/results/demo.md keeps",
}
"""How such blocks begin, and what they are."""
_RESULTS = ROOT / "benchmarks" / "results"


def check(block: Block) -> None:
    """Raises where nobody says what the block is, or it shows what is not so."""
    (begins,) = [begins for begins in DRAWN if block.text.startswith(begins)]
    if begins == "policies/ ":
        for line in block.text.splitlines():
            for folder in re.findall(r"(?:^|(?<= ))([A-Za-z_.-]+/)", line.partition("  ")[0]):
                assert (ROOT / folder).exists(), folder
    if begins == "| backend ":
        kept = (_RESULTS / "demo.md").read_text()
        for row in (line for line in block.text.splitlines() if line.startswith("|")):
            assert row in kept, row
