"""What calibration asks: prompts of many kinds, because how far honest answers drift depends on the text.

Every prompt is made from its kind and a number alone, so that a run can be continued; numbers beyond a kind's stock
give new texts, because the same greedy answer measured twice says nothing new. All are our own words. None is among
the demo's questions, so that nothing there is judged on what it was fitted to.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable

from benchmarks.questions import CALIBRATION

Message = dict[str, str]

LONG_WORDS = 450
"""Words of the long kinds by default; about 600 tokens."""

_SUBJECTS = (
    "the night ferry",
    "a travelling cinema",
    "the town archive",
    "an orchard on a slope",
    "the old weather station",
    "a school for bell ringers",
    "the canal museum",
    "a bakery without an oven",
    "the seed exchange",
    "a tram line nobody uses",
    "the island post office",
    "a workshop for broken radios",
)
_TASKS = (
    "count the even numbers of a list",
    "reverse the words of a sentence",
    "find the longest line of a file",
    "merge two sorted lists",
    "check whether brackets are balanced",
    "turn seconds into hours, minutes and seconds",
    "remove duplicates and keep the order",
    "compute a running average",
)
_LANGUAGES = ("Python", "JavaScript", "Go", "C", "Rust", "SQL and a small shell script")
_TONGUES = ("French", "German", "Spanish", "Italian", "Portuguese", "Dutch")
_THINGS = ("apples", "tickets", "bricks", "letters", "chairs", "lanterns", "coins")
_SERVICES = ("billing", "search", "mailer", "gateway", "inventory", "scheduler")
_EVENTS = (
    "connection to the store was refused, trying again",
    "request finished",
    "queue is longer than usual",
    "worker took a job",
    "cache entry was too old and is fetched anew",
    "slow answer from the upstream",
)
_SENTENCES = (
    "In the {season} of that year, {who} reported that {what}.",
    "Nobody had expected it, although {who} had said before that {what}.",
    "The records of {number} households show that {what}.",
    "According to {who}, it took {number} days until {what}.",
    "It was decided in the {season} to wait, because {what}.",
    "Later it turned out that {what}, which {who} confirmed.",
)
_SEASONS = ("spring", "summer", "autumn", "winter")
_WITNESSES = ("the ferryman", "a surveyor", "the mayor's clerk", "two teachers", "the miller", "a visiting doctor")
_FACTS = (
    "the river had changed its bed",
    "the bridge could no longer carry carts",
    "most of the grain was stored in the wrong barn",
    "the new well gave clear water",
    "the map did not agree with the land",
    "the school needed a second stove",
    "the market moved to the other bank",
)


def _question(number: int, dice: random.Random, words: int) -> list[Message]:
    if number < len(CALIBRATION):
        return _user(CALIBRATION[number])
    return _user(f"Tell me something about {dice.choice(_SUBJECTS)} that a visitor in year {1800 + number} would ask.")


def _code(number: int, dice: random.Random, words: int) -> list[Message]:
    return _user(
        f"Write a function in {dice.choice(_LANGUAGES)} to {_TASKS[number % len(_TASKS)]}. "
        f"It must handle an input of {10 + number} items. Add comments and one example."
    )


def _json(number: int, dice: random.Random, words: int) -> list[Message]:
    fields = dice.sample(("name", "opened", "visitors", "tags", "address", "open_days", "price"), k=4)
    subject = dice.choice(_SUBJECTS)
    return _user(f"Describe {subject} as a JSON object with the fields {', '.join(fields)} and id {number}. Only JSON.")


def _translation(number: int, dice: random.Random, words: int) -> list[Message]:
    tongue = dice.choice(_TONGUES)
    return _user(f"Translate into {tongue}, then explain two of the words in English: “{_passage(dice, 25)}”")


def _summary(number: int, dice: random.Random, words: int) -> list[Message]:
    return _user(f"Summarise this report in three sentences.\n\n{_passage(dice, words)}")


def _logs(number: int, dice: random.Random, words: int) -> list[Message]:
    second = number * 37
    lines = []
    for _ in range(max(3, min(12, words // 12))):
        second += dice.randrange(1, 40)
        clock = f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"
        level = dice.choice(("INFO", "WARN", "ERROR"))
        lines.append(f"{clock} {level} {dice.choice(_SERVICES)}[{dice.randrange(100, 999)}]: {dice.choice(_EVENTS)}")
    return _user("What went wrong here, and what would you look at first?\n\n" + "\n".join(lines))


def _history(number: int, dice: random.Random, words: int) -> list[Message]:
    subject, other = dice.sample(_SUBJECTS, k=2)
    advice = f"I would begin with {subject}: it is quiet in the morning. {_passage(dice, 20)}"
    return [
        {"role": "system", "content": "You are a patient guide. You answer in full sentences."},
        {"role": "user", "content": f"I have {2 + number % 9} hours. Should I see {subject} or {other}?"},
        {"role": "assistant", "content": advice},
        {"role": "user", "content": f"And what about {other} afterwards? Tell me what I would miss otherwise."},
    ]


def _maths(number: int, dice: random.Random, words: int) -> list[Message]:
    thing, start, each = dice.choice(_THINGS), 20 + 3 * number, dice.randrange(3, 9)
    return _user(
        f"A seller has {start} {thing} and sells {each} of them every hour, but buys {each - 2} back at noon. "
        f"How many are left after {dice.randrange(3, 8)} hours? Reason step by step."
    )


def _creative(number: int, dice: random.Random, words: int) -> list[Message]:
    subject = dice.choice(_SUBJECTS)
    form = dice.choice(("a poem", "a strange dream", "a list of rumours", "a dialogue of two liars", "a prophecy"))
    return _user(f"Invent {form} about {subject} and the number {number}. Surprise me; do not be sensible.")


def _long(number: int, dice: random.Random, words: int) -> list[Message]:
    third = max(1, words // 3)
    told = f"{_passage(dice, third)} The code word is “{dice.choice(_THINGS)} {number}”. {_passage(dice, 2 * third)}"
    return _user(f"{told}\n\nWhat is the code word, who is mentioned most, and how might the story go on?")


_KINDS: dict[str, Callable[[int, random.Random, int], list[Message]]] = {
    "question": _question,
    "code": _code,
    "json": _json,
    "translation": _translation,
    "summary": _summary,
    "logs": _logs,
    "history": _history,
    "maths": _maths,
    "creative": _creative,
    "long": _long,
}
KINDS = tuple(_KINDS)


def messages(kind: str, number: int, *, words: int = LONG_WORDS) -> list[Message]:
    """The chat messages of one prompt. `words` is about the length of the long kinds. Raises KeyError."""
    return _KINDS[kind](number, random.Random(f"{kind} {number}"), words)


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _passage(dice: random.Random, words: int) -> str:
    """Sentences of about so many words, none twice in a row."""
    sentences: list[str] = []
    count = 0
    while count < words:
        sentence = dice.choice(_SENTENCES).format(
            season=dice.choice(_SEASONS),
            who=dice.choice(_WITNESSES),
            what=dice.choice(_FACTS),
            number=dice.randrange(3, 900),
        )
        if sentences and sentence == sentences[-1]:
            continue
        sentences.append(sentence)
        count += len(sentence.split())
    return " ".join(sentences)


def fingerprint() -> str:
    """Changes when any prompt does: kept beside what was measured with them."""
    sample = [messages(kind, number) for kind in KINDS for number in (0, 1, 50)]
    return hashlib.sha256(json.dumps(sample).encode()).hexdigest()[:12]
