"""The words prompts are made of: ten kinds of question, each with filler of its own, drawn by a seeded generator."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

CATEGORIES = (
    "short_qa",
    "code",
    "math_numeric",
    "json_structured",
    "mixed_language",
    "summarization",
    "logs",
    "chat",
    "needle",
    "low_margin",
)

PLACES = ("Aarhus", "Bergen", "Coimbra", "Delft", "Esztergom", "Fez", "Ghent", "Hobart", "Izmir", "Jaipur")
PEOPLE = ("Amal", "Birgit", "Chidi", "Dalia", "Emre", "Freya", "Goran", "Hana", "Ivo", "Jun")
THINGS = ("kettle", "ladder", "compass", "violin", "anchor", "lantern", "telescope", "loom", "saddle", "bellows")
VERBS = ("repaired", "sold", "painted", "lost", "borrowed", "measured", "weighed", "carried", "hid", "described")
SERVICES = ("ingest", "billing", "search", "mailer", "gateway", "thumbnailer", "scheduler", "ledger")
LEVELS = ("INFO", "INFO", "INFO", "WARN", "DEBUG", "ERROR")
EVENTS = ("request finished", "cache miss", "retrying upstream", "queue drained", "lease renewed", "checksum differs")

Parts = tuple[str, Callable[[Random], str], str]
"""What stands first, what fills the room up to the wanted length, and what stands last."""


def parts(category: str, random: Random) -> Parts:
    """One prompt of a category, before it is brought to length."""
    return _MAKERS[category](random)


def sentence(random: Random) -> str:
    """A plain sentence of filler."""
    person, place, thing = random.choice(PEOPLE), random.choice(PLACES), random.choice(THINGS)
    return f"{person} from {place} {random.choice(VERBS)} a {thing} on day {random.randint(1, 365)}. "


def _short_qa(random: Random) -> Parts:
    thing = random.choice(THINGS)
    return "", sentence, f"Question: what is a {thing} used for, and who would own one? Answer:"


def _code(random: Random) -> Parts:
    name = f"{random.choice(VERBS)}_{random.choice(THINGS)}"

    def helper(random: Random) -> str:
        left, right = random.sample("abcdefgh", 2)
        number = random.randint(2, 99)
        return f"def step_{random.randint(0, 9999)}({left}, {right}):\n    return {left} * {number} - {right}\n\n"

    ask = f"# Returns every {random.randint(2, 9)}th item of a list, last one first.\ndef {name}(items):\n"
    return "", helper, ask


def _math(random: Random) -> Parts:
    def fact(random: Random) -> str:
        first, second = random.randint(11, 999), random.randint(11, 999)
        return f"{first} + {second} = {first + second}. "

    first, second, third = (random.randint(12, 98) for _ in range(3))
    return "", fact, f"Compute {first} * {second} + {third} and show each step. Result:"


def _json(random: Random) -> Parts:
    def record(random: Random) -> str:
        found = {"owner": random.choice(PEOPLE), "item": random.choice(THINGS), "count": random.randint(0, 500)}
        return json.dumps(found) + "\n"

    last = f'Write the next record for {random.choice(PEOPLE)} with the same keys and nothing else:\n{{"owner":'
    return "", record, last


def _mixed(random: Random) -> Parts:
    lines = (
        "Der Zug nach {place} hat heute Verspätung. ",
        "La lumière du soir tombe sur {place}. ",
        "En {place} llueve casi todos los días. ",
        "{place}では朝市が開かれる。",
        "В городе {place} открыли новый мост. ",
        "{place} 的冬天很长。",
        "Nel porto di {place} arrivano tre navi. ",
    )

    def line(random: Random) -> str:
        return random.choice(lines).format(place=random.choice(PLACES))

    return "", line, f"Translate into English: {line(random)}\nEnglish:"


def _summary(random: Random) -> Parts:
    return "Text: ", sentence, "\nSummarise the text in two sentences:"


def _logs(random: Random) -> Parts:
    def line(random: Random) -> str:
        clock = f"{random.randint(0, 23):02}:{random.randint(0, 59):02}:{random.randint(0, 59):02}"
        took = random.randint(1, 4000)
        return f"{clock} {random.choice(LEVELS)} {random.choice(SERVICES)} {random.choice(EVENTS)} ({took} ms)\n"

    return "", line, "What went wrong in these lines, and which service should be looked at first?\n"


def _chat(random: Random) -> Parts:
    def turn(random: Random) -> str:
        asked = f"User: Did {random.choice(PEOPLE)} find the {random.choice(THINGS)}?\n"
        return asked + f"Assistant: Yes, in {random.choice(PLACES)}.\n"

    return "", turn, f"User: Plan a weekend in {random.choice(PLACES)} for two people.\nAssistant:"


def _needle(random: Random) -> Parts:
    person, number = random.choice(PEOPLE), random.randint(1000, 9999)
    return f"The locker of {person} has the number {number}. ", sentence, f"The number of {person}'s locker is"


def _low_margin(random: Random) -> Parts:
    first, second = random.sample(THINGS, 2)
    ask = f"Pick one at random, {first} or {second}, then go on picking, one word a line:\n"
    return "", lambda random: random.choice(THINGS) + "\n", ask


_MAKERS: dict[str, Callable[[Random], Parts]] = dict(
    zip(
        CATEGORIES,
        (_short_qa, _code, _math, _json, _mixed, _summary, _logs, _chat, _needle, _low_margin),
        strict=True,
    )
)
