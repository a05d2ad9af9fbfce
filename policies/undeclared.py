"""What a declaration leaves out, and what an untrusted backend may then do that no check sees.

None of it is learned from the backend. vLLM says its `max_model_len` in `/v1/models`, but a backend that cuts its
answers would say there whatever excuses that, and one that does not has nothing to gain by the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.settings import Settings


@dataclass(frozen=True, slots=True)
class Undeclared:
    """A setting that is missing (`models.NAME.…`), and what goes unseen without it."""

    setting: str
    unseen: str


_UNSEEN = {
    "tokenizer": "a backend may show other text than its tokens spell",
    "vocab_size": "a backend may name tokens that the model does not have",
    "max_model_len": "a backend may end any answer by `length`, however few tokens it has (`no_max_model_len`)",
    "eos_token_ids": "a backend may end any answer by `stop`, and go on after its end",
}


def undeclared(settings: Settings) -> Sequence[Undeclared]:
    """For every model that has a backend which is not marked `trusted`."""
    models = [
        name
        for name in settings.models
        if any(backend.model == name and not backend.trusted for backend in settings.backends)
    ]
    return [
        Undeclared(f"models.{name}.{key}", unseen)
        for name in models
        for key, unseen in _UNSEEN.items()
        if not getattr(settings.models[name], key)
    ]
