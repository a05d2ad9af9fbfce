"""What a request may cost in tokens, before anybody knows, and how limits are told to clients."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_TOKEN = 4
"""Bytes of a prompt's JSON that make one token of ordinary text."""
IMAGE_TOKENS = 4096
"""Tokens that an image takes at most, where the model's length does not say."""


ASSUMED_LENGTH = 131_072
"""Tokens of a prompt and its answer where the model's length is not declared."""
LONGEST_ANSWER = 524_288
"""Tokens of an answer whose length nobody declared, at the very most."""
TEMPLATE_TOKENS = 4096
"""Tokens that a chat template may put around a prompt beyond what the JSON around it makes up for."""
MOST_TOKENS = 10**9
"""Tokens that one request is ever charged for."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens that a request may take, prompt and answers together.

    Attributes:
        likely: as its text usually comes out, with answers as long as they are allowed to be.
        most: what it can take at the very most.
        least: its prompt alone, as it usually comes out.
        open: the client set no length for the answers; `likely` and `most` then come from the model's own length.
        known: `most` is certain; it is not where that length is not declared, and neither is the answers'.
        cap: what it is charged at the most, whatever a backend bills or says that the prompt was: what the request can
            explain.
    """

    likely: int
    most: int
    least: int
    open: bool = False
    known: bool = True
    cap: int = MOST_TOKENS

    def taken(self, prompt: int | None, answer: int | None) -> int:
        """What it came to, given the tokens of the prompt and of the answer as far as they are known."""
        counts = (self.least if prompt is None else prompt, answer or 0)
        return min(sum(max(count, 0) for count in counts), self.cap)


NOTHING = Cost(0, 0, 0)
"""A request that takes no tokens."""


def cost(
    prompt_bytes: int,
    *,
    images: int = 0,
    prompts: int = 1,
    n: int = 1,
    answer: int | None,
    context: int | None = None,
) -> Cost:
    """What a request may cost.

    Args:
        prompt_bytes: of the JSON that the prompts come in, without images. No text has more tokens than bytes, and the
            JSON around it is longer than what chat templates put there.
        images: how many there are.
        prompts, n: prompts, and answers to each.
        answer: tokens allowed per answer; None is as long as the model's length lets it be.
        context: the longest prompt plus answer (`max_model_len`).
    """
    least = -(-prompt_bytes // BYTES_PER_TOKEN) + images * (IMAGE_TOKENS // 4)
    longest = prompt_bytes + images * IMAGE_TOKENS
    unsaid = answer is None
    if context is not None:
        least, longest = min(least, prompts * context), min(longest, prompts * context)
        answer = context if answer is None else min(answer, context)
    explained = prompt_bytes + prompts * TEMPLATE_TOKENS + images * ASSUMED_LENGTH
    explained += prompts * n * (LONGEST_ANSWER if answer is None else max(answer, 0))
    if answer is None:
        assumed, cap = prompts * n * ASSUMED_LENGTH, min(explained, MOST_TOKENS)
        return Cost(least + assumed, longest + assumed, least, open=True, known=False, cap=cap)
    answers = prompts * n * max(answer, 0)
    if context is None:
        return Cost(least + answers, longest + answers, least, cap=min(explained, MOST_TOKENS))
    # Each prompt and its answer share the model's length.
    whole = prompts * context + prompts * (n - 1) * max(answer, 0)
    cap = min(prompts * context * (n + 1), explained, MOST_TOKENS)
    return Cost(min(least + answers, whole), min(longest + answers, whole), least, open=unsaid, cap=cap)


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
