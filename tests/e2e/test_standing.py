"""Standing on a running stack: who turns bad is quarantined in time, who withholds is never trusted, and two clients
cannot frame an honest backend.

Slow: a CPU gives some hundred tokens a second, and a good history is made of 200 answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.adversary.base import Setup
from benchmarks.adversary.prompts import HiddenPrompt
from benchmarks.adversary.relays import Honest
from benchmarks.adversary.servers import Site
from benchmarks.demo.models import DemoModels
from benchmarks.standing.predict import generations
from policies.settings import AuditSettings, StandingSettings, hash_key
from policies.unit import outcomes
from tests.e2e.product import HONEST, Product, calibrated, running
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.e2e

GOOD = 200
TOKENS = 17
CALIBRATION = (
    "--requests",
    "96",
    "--concurrency",
    "8",
    "--lengths",
    "18",
    "--temperatures",
    "0.8",
    "--replays",
    "1",
    "--kinds",
    "question,translation,maths,creative",
)
"""One condition and many answers of it: standing bets against a bound that falls with their number."""
CLIENTS = ("one", "two", "three")
MARK = "Riddle:"
RULES, AUDIT = StandingSettings(trusted_after=150), AuditSettings(full=1.0)
TOPICS = ("harbour", "orchard", "library", "glacier", "market", "violin", "lighthouse", "desert", "bakery", "train")
WAYS = ("Describe a", "Tell me about a", "Write a story about a", "Explain to a child what a", "Give advice about a")
_numbers = itertools.count()


def question(mark: str = "") -> str:
    """A question that was not asked before."""
    at = next(_numbers)
    return f"{mark} {WAYS[at % len(WAYS)]} {TOPICS[at // len(WAYS) % len(TOPICS)]} in the year {1500 + at}.".strip()


class Framed(HiddenPrompt):
    """An honest backend, but for prompts of one kind, on which it is as far from its calibration as a cheat.

    Stands for prompts that a calibration did not foresee and that only colluding clients know.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._honest = Honest(setup)

    def join(self, session: Any) -> None:
        super().join(session)
        self._honest.join(session)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        odd = asked["messages"][-1]["content"].startswith(MARK)
        return await (super().generate(request) if odd else self._honest.generate(request))


@contextmanager
def serving(app: web.Application) -> Iterator[str]:
    """The application on a port of this machine, in a thread."""
    loop, started, where = asyncio.new_event_loop(), threading.Event(), [""]

    async def run() -> None:
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        where[0] = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    task = loop.create_task(run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.gather(task, return_exceptions=True)))
    thread.start()
    assert started.wait(PATIENCE)
    try:
        yield where[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(PATIENCE)
        loop.close()


class Stack:
    """The product with one client per key."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.clients = {name: Product(product.url, product.webhooks, key=name) for name in CLIENTS}

    def ask(self, backend: str, count: int, keys: tuple[str, ...] = CLIENTS, mark: str = "") -> list[dict[str, Any]]:
        """Verifications of that many answers to questions of their own, the clients taking turns."""
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(
                    self.clients[keys[at % len(keys)]].chat,
                    backend,
                    messages=[{"role": "user", "content": question(mark)}],
                    max_tokens=TOKENS,
                )
                for at in range(count)
            ]
            owners = [self.clients[keys[at % len(keys)]] for at in range(count)]
            return [owner.verification(one.result()[0]) for owner, one in zip(owners, asked, strict=True)]

    def standing(self, backend: str) -> dict[str, Any]:
        """The backend's standing, once every verdict is in it."""
        return self._get(f"/v1/backends/{backend}/standing")

    def settled(self, backend: str, generations: int) -> dict[str, Any]:
        """The standing once it has taken in so many generations."""
        deadline = time.monotonic() + 10 * PATIENCE
        while (found := self.standing(backend))["coverage"]["generations"] < generations:
            assert time.monotonic() < deadline, found["coverage"]
            time.sleep(0.2)
        return found

    def close(self) -> None:
        """Close the clients."""
        for client in self.clients.values():
            client.close()

    def _get(self, path: str) -> dict[str, Any]:
        response = self.product.http.get(path)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def told(self, backend: str) -> list[str]:
        """Types of the events that the webhook heard about a backend."""
        bodies = [json.loads(body) for _, body in self.product.webhooks.got]
        return [
            body["type"]
            for body in bodies
            if body["type"].startswith("backend.") and body["data"]["backend"] == backend
        ]


@pytest.fixture(scope="module")
def narrow_profile(
    demo_models: DemoModels, vllm_server: str, valkey: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A profile of what these tests ask. While developing, TEST_NARROW_PROFILE names one made before."""
    made, folder = os.environ.get("TEST_NARROW_PROFILE"), tmp_path_factory.mktemp("narrow")
    return Path(made) if made else calibrated(demo_models, vllm_server, valkey, folder, CALIBRATION)


@pytest.fixture(scope="module")
def stack(
    demo_models: DemoModels,
    vllm_server: str,
    valkey: str,
    narrow_profile: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    cheats = {
        "drifter": ["good-then-bad", "--good", str(GOOD), "--then", "hidden-prompt"],
        "turncoat": ["good-then-bad", "--good", "40", "--then", "hot"],
        "hidden": ["hidden-prompt"],
        "silent": ["no-logprobs"],
        "sometimes": ["sometimes", "--share", "0.1"],
    }
    keys = [{"name": name, "sha256": hash_key(name), "admin": True} for name in ("sk-e2e", *CLIENTS)]
    sections: dict[str, Any] = {"keys": keys, "audit": AUDIT.model_dump(exclude_unset=True)}
    sections["standing"] = RULES.model_dump(exclude_unset=True)
    with serving(Framed(Setup(Site(vllm_server))).app()) as framed:
        cheats["framed"] = [framed]
        folder = tmp_path_factory.mktemp("standing")
        with running(demo_models, vllm_server, valkey + "/1", folder, narrow_profile, cheats, sections) as product:
            stack = Stack(product)
            yield stack
            stack.close()


def until_quarantine(stack: Stack, backend: str, before: int, limit: int, step: int = 6) -> int:
    """Answers served since `before` until the backend is quarantined, counted in groups of `step`.

    Raises AssertionError when it is not by the group that reaches `limit`.
    """
    served = before
    while served - before < limit:
        stack.ask(backend, step)
        served += step
        if stack.settled(backend, served)["state"] == "quarantined":
            return served - before
    raise AssertionError(stack.standing(backend))


def test_who_turns_bad_after_200_honest_answers_is_quarantined_as_soon_as_simulated(stack: Stack) -> None:
    honest = stack.ask("drifter", GOOD)
    good = stack.settled("drifter", GOOD)
    assert good["state"] == "trusted", good["reasons"]
    assert good["audit_rate"] < 1
    cheating = [outcomes(found["checks"]) for found in stack.ask("hidden", 12)]
    expected = generations(
        cheating,
        [outcomes(found["checks"]) for found in honest if found["audited"]],
        before=GOOD,
        keys=CLIENTS,
        rules=RULES,
        audits=AUDIT,
    )
    assert expected.high is not None
    # 95 % of the simulated runs, and half as much again: twelve answers say only so well how often one is beyond.
    limit = math.ceil(1.5 * expected.high)
    took = until_quarantine(stack, "drifter", GOOD, limit)
    print(f"quarantined after {took} answers; simulated: {expected}")
    found = stack.standing("drifter")
    assert found["evidence"]["accused"]["basis"] == "replayed"
    assert found["evidence"]["level"] == pytest.approx(RULES.alpha + found["evidence"]["delta"])
    assert found["evidence"]["delta"] > 0
    assert found["accusing"]
    assert [entry["after"] for entry in found["trail"]] == ["trial", "trusted", "suspect", "quarantined"]


def test_a_changed_temperature_is_accused_by_exact_checks(stack: Stack) -> None:
    stack.ask("turncoat", 40)
    took = until_quarantine(stack, "turncoat", 40, limit=18)
    assert took <= 12
    assert stack.standing("turncoat")["evidence"]["accused"]["basis"] == "exact"


def test_who_withholds_is_never_trusted(stack: Stack) -> None:
    stack.ask("silent", 6)
    assert stack.settled("silent", 6)["state"] == "quarantined"
    for served in range(25, 101, 25):
        stack.ask("sometimes", 25)
        found = stack.settled("sometimes", served)
        assert found["state"] != "trusted"
        # Trust takes more answers than these, so suspicion is all that more of them could show.
        if found["state"] in ("suspect", "quarantined"):
            break
    assert found["state"] in ("suspect", "quarantined"), found["reasons"]
    for name in ("silent", "sometimes"):
        assert "trusted" not in [entry["after"] for entry in stack.standing(name)["trail"]]


def test_two_colluding_clients_cannot_frame_an_honest_backend_and_a_third_witness_can(stack: Stack) -> None:
    stack.ask("framed", 6, keys=("three",))
    words = [found["verdict"] for found in stack.ask("framed", 44, keys=("one", "two"), mark=MARK)]
    assert words.count("reject") > 30
    found = stack.settled("framed", 50)
    assert found["evidence"]["log10"] >= found["evidence"]["needed_log10"]
    assert found["state"] == "suspect"
    assert "rests on what two client keys asked" in found["reasons"][0]
    stack.ask("framed", 30, keys=("three",), mark=MARK)
    assert stack.settled("framed", 80)["state"] == "quarantined"


def test_the_honest_backend_stays_in_good_standing(stack: Stack) -> None:
    stack.ask(HONEST, 12)
    assert stack.settled(HONEST, 12)["state"] in ("trial", "trusted")


def test_quarantine_is_told_honoured_and_undone_by_the_operator_alone(stack: Stack) -> None:
    stack.ask("silent", 6) if stack.standing("silent")["state"] != "quarantined" else None
    deadline = time.monotonic() + PATIENCE
    while "backend.quarantined" not in stack.told("silent"):
        assert time.monotonic() < deadline, stack.told("silent")
        time.sleep(0.2)
    for _ in range(12):
        answer = stack.clients["one"].openai.chat.completions.with_raw_response.create(
            model="smollm2", messages=[{"role": "user", "content": question()}], max_tokens=1
        )
        id = answer.headers["x-countersign-id"]
        assert stack.clients["one"].verification(id)["backend"] != "silent"
    pardon = {"action": "pardon", "why": "its operator mended it"}
    response = stack.product.http.post("/v1/backends/silent/standing", json=pardon)
    response.raise_for_status()
    found = stack.standing("silent")
    assert (found["state"], found["life"], found["audit_rate"]) == ("trial", 2, 1.0)
    assert found["evidence"]["budget"] == pytest.approx(RULES.alpha / 6)
    assert found["trail"][-1]["action"] == "pardon"
