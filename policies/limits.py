"""What a request may cost in tokens, before anybody knows, and how limits are told to clients."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_TOKEN = 4
"""Bytes of a prompt's JSON that make one token of ordinary text."""
UNSEEN_TOKENS = 1024
"""Tokens that an image usually takes, or whatever else of a prompt does not stand in the request."""
ASSUMED_LENGTH = 131_072
"""Tokens of a prompt and its answer where the model's length is not declared."""
MOST_TOKENS = 10**9
"""Tokens that one request is ever charged for."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens that a request may take, prompt and answers together.

    Attributes:
        likely: as its text usually comes out, with answers as long as they are allowed to be.
        most: what it can take at the very most, and what it is charged at the most: what a backend bills beyond that,
            or says that the prompt was, the request does not explain.
        least: its prompt alone, as it usually comes out.
        open: the client set no length for the answers; `likely` and `most` then come from the model's own length.
        known: `most` is certain. It is not where the model's length is not declared, and neither is the answers', or
            not all of the prompt stands in the request.
    """

    likely: int
    most: int
    least: int
    open: bool = False
    known: bool = True

    def taken(self, prompt: int | None, answer: int | None) -> int:
        """What it came to, given the tokens of the prompt and of the answer as far as they are known."""
        counts = (self.least if prompt is None else prompt, answer or 0)
        return min(sum(max(count, 0) for count in counts), self.most, MOST_TOKENS)


NOTHING = Cost(0, 0, 0)
"""A request that takes no tokens."""


def cost(
    prompt_bytes: int,
    *,
    template: int = 0,
    unseen: int = 0,
    prompts: int = 1,
    n: int = 1,
    answer: int | None,
    context: int | None = None,
) -> Cost:
    """What a request may cost.

    Args:
        prompt_bytes: of the JSON that the prompts come in, without images. No text has more tokens than bytes.
        template: tokens that a chat template may add to that JSON.
        unseen: how many images there are, and other parts of the prompt that do not stand in the request.
        prompts, n: prompts, and answers to each.
        answer: tokens allowed per answer; None is as long as the model's length lets it be.
        context: the longest prompt plus answer (`max_model_len`).
    """
    least = -(-prompt_bytes // BYTES_PER_TOKEN) + unseen * UNSEEN_TOKENS
    longest = prompt_bytes + template
    if context is None:
        if unseen:
            longest = max(longest + ASSUMED_LENGTH, least)
        answers = prompts * n * (ASSUMED_LENGTH if answer is None else max(answer, 0))
        known = answer is not None and not unseen
        return Cost(least + answers, longest + answers, least, open=answer is None, known=known)
    whole = prompts * context
    least, longest = min(least, whole), whole if unseen else min(longest, whole)
    each = context if answer is None else min(max(answer, 0), context)
    # Each prompt and its first answer share the model's length.
    answers, whole = prompts * n * each, whole + prompts * (n - 1) * each
    return Cost(min(least + answers, whole), min(longest + answers, whole), least, open=answer is None)


def duration(milliseconds: int) -> str:
    """A time as OpenAI's headers write it: `0s`, `17ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    if milliseconds <= 0:
        return "0s"
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = str(seconds) + (f".{rest:03d}".rstrip("0") if rest else "") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
