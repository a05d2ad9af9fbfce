"""JSON blocks, compared by shape with what a running stack takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import Any

import httpx
import orjson

from policies import jws, receipt
from tests.docs.pages import Block
from tests.docs.trial import CHEAT, CHEATED, MODEL, Trial
from verifier_pool.link import events

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
STANDING = "a decision about a backend"
KINDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "verification": lambda tree: tree.get("object") == "verification",
    "receipt": lambda tree: tree.get("schema") == receipt.SCHEMA,
    "error": lambda tree: set(tree) == {"error"},
    "event": lambda tree: set(tree) == {"type", "timestamp", "sequence", "data"},
    "chat request": lambda tree: {"model", "messages"} <= set(tree),
    STANDING: lambda tree: set(tree) == {"action", "why"},
    "key to make": lambda tree: "name" in tree and "limits" in tree and "sha256" not in tree,
    "log line": lambda tree: {"level", "message"} <= set(tree),
}
"""What a block may be, and how it is told. A log line is compared with those of the trial's proxy."""


class Live:
    """What the stack really says."""

    def __init__(self, stack: Trial) -> None:
        self.stack = stack
        self.http = httpx.Client(base_url=stack.url, timeout=60)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.http.close()

    def ask(self, model: str) -> httpx.Response:
        """One answer, with its verdict."""
        headers = {"x-countersign-mode": "inline"}
        body = {"model": model, "messages": MESSAGES, "temperature": 0.8}
        return self.http.post("/v1/chat/completions", json=body, headers=headers)

    @cached_property
    def verifications(self) -> list[dict[str, Any]]:
        """One of an honest answer, which passes, and one of a cheat's, which does not."""
        return [self.ask(model).json()["countersign"] for model in (MODEL, CHEATED)]

    @cached_property
    def receipts(self) -> list[dict[str, Any]]:
        """What their receipts say."""
        keys = jws.keys_in(self.http.get("/.well-known/countersign-keys.json").json())
        told = [self.http.get(f"/v1/verifications/{each['id']}/receipt").json() for each in self.verifications]
        return [dict(receipt.verify_receipt(each["receipt"], keys).statement) for each in told]

    @cached_property
    def error(self) -> dict[str, Any]:
        """Any of the proxy's own."""
        tree: dict[str, Any] = self.http.get("/v1/verifications/" + "0" * 32).json()
        return tree

    @cached_property
    def log_lines(self) -> list[dict[str, Any]]:
        """The proxy's log."""
        _ = self.verifications
        return [orjson.loads(line) for line in (self.stack.folder / "proxy.log").read_bytes().splitlines()]


def kind_of(block: Block) -> tuple[str, dict[str, Any]]:
    """What a block is, and its tree. Raises where it is nothing known, or no JSON."""
    tree = orjson.loads(block.text)
    kinds = [name for name, told in KINDS.items() if isinstance(tree, dict) and told(tree)]
    assert len(kinds) == 1, f"{block.where}: {kinds}"
    return kinds[0], tree


def compare(block: Block, live: Live) -> None:
    """Raises where the stack takes or gives something else."""
    kind, tree = kind_of(block)
    if kind == "verification":
        assert any(_fits(tree, given) for given in live.verifications), block.where
    elif kind == "receipt":
        assert any(_fits(tree, given) for given in live.receipts), block.where
    elif kind == "error":
        assert _fits(tree, live.error), block.where
    elif kind == "event":
        happened = [events.of_verdict(given | {"owner": ""}) for given in live.verifications]
        told = [orjson.loads(b"1".join(each.body("verification.completed"))) for each in happened]
        assert any(_fits(tree, given) for given in told), block.where
    elif kind == "chat request":
        assert live.http.post("/v1/chat/completions", json=tree).status_code == 200, block.where
    elif kind == STANDING:
        answer = live.http.post(f"/v1/backends/{CHEAT}/standing", json=tree)
        assert answer.status_code == 200, answer.text
    elif kind == "log line":
        assert any(_fits(tree, given) for given in live.log_lines), block.where
    else:
        answer = live.http.post("/v1/keys", json=tree)
        assert answer.status_code == 201, answer.text
        # The first key shuts this machine out; by it we may go on.
        live.http.headers["authorization"] = f"Bearer {answer.json()['key']}"


def _fits(shown: Any, given: Any) -> bool:
    """Whether what a page shows could have been given: no other members, values of the same types."""
    if isinstance(shown, dict):
        return isinstance(given, dict) and all(
            key in given and _fits(value, given[key]) for key, value in shown.items()
        )
    if isinstance(shown, list):
        return isinstance(given, list) and all(any(_fits(each, other) for other in given) for each in shown)
    if shown is None or given is None:
        return True
    if isinstance(shown, bool) or isinstance(given, bool):
        return isinstance(shown, bool) and isinstance(given, bool)
    kinds = ((int, float), (str,))
    return any(isinstance(shown, kind) and isinstance(given, kind) for kind in kinds)
