"""Section of the settings about what is kept of prompts and answers, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from policies._sections import Section

Retain = Literal["none", "rejects", "all"]
"""What is kept of an answer's evidence once its verdict is final: nothing, that of rejected answers, or all of it, each
no longer than `verification.evidence_ttl`."""


def keeps(retain: object, verdict: object) -> bool:
    """Whether what a verdict rests on is kept once it is final. `retain` is the intent's; without one all is."""
    return retain != "none" and (retain != "rejects" or verdict == "reject")


class StorageSettings(Section):
    """What is kept of prompts and answers, and how it lies in Redis.

    Attributes:
        retain: of client keys without their own, what is kept of an answer's evidence once its verdict is final:
            `none`, `rejects` (that of rejected answers), or `all`; never longer than `verification.evidence_ttl`.
        encryption_keys: keys that evidence, replays, what signs receipts, keys of backends and secrets of webhooks are
            encrypted with in Redis (AES-256-GCM): 32 random bytes each in base64, with spaces between. The first one
            encrypts, all of them decrypt. Without any nothing is encrypted. The proxy and every worker need them.
        encryption_keys_file: path of a file with such keys, one a line; those come after `encryption_keys`.
        rewrite_seconds: seconds after which a worker has Redis write its append-only file anew, which until then holds
            what was deleted; 0 leaves that to Redis. It takes Redis a fork, and as much disk again as it has data.
    """

    retain: Retain = "all"
    encryption_keys: SecretStr | None = None
    encryption_keys_file: str | None = None
    rewrite_seconds: int = Field(3600, ge=0)
