"""Every cheat and every honest variant by name, and the table of them that the documentation shows."""

from __future__ import annotations

from benchmarks.adversary import billing, edits, endings, prompts, relays, sampling, spoofs, turncoat, withheld
from benchmarks.adversary.base import Cheat

ATTACKS: dict[str, type[Cheat]] = {
    attack.name: attack
    for attack in (
        relays.Honest,
        relays.HonestBatch,
        relays.HonestLong,
        relays.HonestChunked,
        relays.HonestKernel,
        relays.HonestSpeculative,
        relays.Fp8,
        relays.Int8,
        relays.Int4,
        relays.LayerDropped,
        relays.Other,
        relays.KvFp8,
        spoofs.Spoofer,
        spoofs.SpoofRepaired,
        spoofs.SpoofBent,
        spoofs.SpoofRepairedBent,
        spoofs.SpoofOmitted,
        spoofs.InventedTopK,
        sampling.Hot,
        sampling.TopP,
        sampling.Greedy,
        prompts.HiddenPrompt,
        prompts.HiddenPromptSpoofed,
        prompts.Truncated,
        endings.EarlyStop,
        endings.CutShort,
        endings.Padding,
        endings.PaddingOpen,
        edits.Substitution,
        edits.TextSubstitution,
        edits.Retokenised,
        billing.Usage,
        billing.Cached,
        withheld.NoLogprobs,
        withheld.NoTokenIds,
        withheld.NoPromptIds,
        withheld.NoRoutedExperts,
        withheld.NanLogprobs,
        withheld.MaskedLogprobs,
        withheld.ShortLists,
        withheld.Duplicates,
        withheld.Unsorted,
        withheld.BrokenFrame,
        withheld.WrongIds,
        turncoat.GoodThenBad,
        turncoat.Sometimes,
    )
}
"""Honest variants first."""

COLUMNS = ("name", "what it does", "tokens from", "should be caught by", "limits")


def needs(attack: type[Cheat]) -> str:
    """Where its tokens come from, and what else it asks."""
    source = {"own": "a server of its own", "cheap": "a cheap server", "true": "the true server"}[attack.generates]
    return f"{source}; prefills of the true one" if attack.scores and attack.generates == "cheap" else source


def rows() -> list[tuple[str, ...]]:
    """One row per attack, of `COLUMNS`."""
    return [
        (
            name,
            attack.about,
            needs(attack),
            "nobody: it is honest" if attack.honest else ", ".join(attack.caught_by) or "not expected to be",
            attack.limits,
        )
        for name, attack in ATTACKS.items()
    ]


def markdown() -> str:
    """The table as Markdown."""
    lines = [" | ".join(("", *COLUMNS, "")), "|" + "---|" * len(COLUMNS)]
    lines += [" | ".join(("", f"`{name}`", *cells, "")) for name, *cells in rows()]
    return "\n".join(line.strip() for line in lines)


def text() -> str:
    """The names and what they do, for a terminal."""
    width = max(map(len, ATTACKS))
    return "\n".join(f"  {name:<{width}}  {attack.about}" for name, attack in ATTACKS.items())
