"""The whole product as processes of its own, in front of one real vLLM server and the cheats."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from benchmarks.demo import layout, servers
from benchmarks.demo.models import DemoModels
from benchmarks.demo.processes import Children, answers, free_ports
from tests.support.toy_http import Handler, served

SECRET = "whsec_" + "c2VjcmV0" * 5
HONEST = "honest"
CHEATS = ("hot", "hidden-prompt", "no-logprobs", "usage")
KEY = "sk-e2e"
COUNTERSIGN = [sys.executable, "-m", "countersign"]
CALIBRATION = ["--requests", "40", "--lengths", "48", "--temperatures", "0,0.8", "--forms", "full", "--replays", "1"]
CALIBRATION += ["--kinds", layout.CALIBRATION["--kinds"]]
"""What the main job's tests ask, and no more: none of their prompts is a long one, as two kinds of the ten are."""


@dataclass
class Receiver:
    """Takes webhooks and keeps them: headers and body of each."""

    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    def of(self, id: str) -> list[tuple[dict[str, str], bytes]]:
        """Those about one verification."""
        return [(headers, body) for headers, body in self.got if json.loads(body)["data"].get("id") == id]


@contextmanager
def receiving() -> Iterator[tuple[str, Receiver]]:
    """A webhook receiver on this machine, and its URL."""
    receiver = Receiver()

    class Posted(Handler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()

    with served(Posted) as url:
        yield f"{url}/hook", receiver


@dataclass
class Product:
    """The running product, asked through the openai SDK."""

    url: str
    webhooks: Receiver

    key: str = KEY
    asked: list[str] = field(default_factory=list)
    """Ids of the answers so far."""

    def __post_init__(self) -> None:
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key=self.key, max_retries=0, timeout=300)
        self.http = httpx.Client(
            base_url=self.url, trust_env=False, timeout=120, headers={"authorization": f"Bearer {self.key}"}
        )

    def close(self) -> None:
        """Close the clients."""
        self.openai.close()
        self.http.close()

    def chat(self, backend: str = HONEST, mode: str = "async", **fields: Any) -> tuple[str, Any]:
        """One chat request; the verification's id and the SDK's answer (a list of chunks for a stream)."""
        body: dict[str, Any] = {"model": servers.MODEL, "max_tokens": 48, "temperature": 0.8, **fields}
        response = self.openai.chat.completions.with_raw_response.create(
            **body, extra_headers={"x-countersign-backend": backend, "x-countersign-mode": mode}
        )
        answer: Any = response.parse()
        self.asked.append(response.headers["x-countersign-id"])
        return response.headers["x-countersign-id"], list(answer) if fields.get("stream") else answer

    def verification(self, id: str) -> dict[str, Any]:
        """The verification, waited for."""
        for _ in range(6):
            response = self.http.get(f"/v1/verifications/{id}", params={"wait": 20})
            response.raise_for_status()
            found: dict[str, Any] = response.json()
            if found["status"] == "done":
                return found
        raise AssertionError(f"no verdict for {id} after two minutes")


def check_of(verification: dict[str, Any], name: str) -> dict[str, Any]:
    """One check of a verification."""
    return next(check for check in verification["checks"] if check["name"] == name)


def settings(
    models: DemoModels, urls: dict[str, str], redis_url: str, folder: Path, port: int, profile: Path
) -> dict[str, Any]:
    """The demo's settings, its reference engine included, on another Redis."""
    tree = layout.configuration(models, urls, port=port, store=folder / "store", profile=profile)
    del tree["embedded_dir"]
    tree["redis_url"] = redis_url
    return tree


def calibrated(
    models: DemoModels, vllm: str, redis_url: str, folder: Path, arguments: Sequence[str] = CALIBRATION
) -> Path:
    """A profile of the honest server, measured in a minute or two."""
    config, profile = folder / "countersign.yaml", folder / "profile.json"
    config.write_text(yaml.safe_dump(settings(models, {HONEST: vllm}, redis_url, folder, 8700, profile)))
    with Children(folder) as children:
        command = ["calibrate", "--config", str(config), "--backend", HONEST, *arguments, "--output", str(profile)]
        child = children.start("calibrate", [*COUNTERSIGN, *command], servers.environment(engines=2))
        children.finish(child, 1800, lambda line: None, str)
    return profile


@contextmanager
def running(
    models: DemoModels,
    vllm: str,
    redis_url: str,
    folder: Path,
    profile: Path,
    cheats: Mapping[str, Sequence[str]],
    sections: Mapping[str, Any] | None = None,
) -> Iterator[Product]:
    """Start proxy, worker and cheats as processes. `cheats` maps a backend's name to arguments of `attack serve`;
    one that is a URL already runs."""
    port, *ports = free_ports(1 + len(cheats))
    at = {name: f"http://127.0.0.1:{free}" for name, free in zip(cheats, ports, strict=True)}
    at = {name: given[0] if given[0].startswith("http") else at[name] for name, given in cheats.items()}
    config = folder / "countersign.yaml"
    with receiving() as (hook, webhooks), Children(folder) as children:
        tree = settings(models, {HONEST: vllm, **at}, redis_url, folder, port, profile) | dict(sections or {})
        tree["webhook"] = {"url": hook, "secret": SECRET, "allow_private": True}
        config.write_text(yaml.safe_dump(tree))
        for name, given in cheats.items():
            if at[name] == given[0]:
                continue
            serve = ["attack", "serve", *given, "--port", at[name].rpartition(":")[2], "--upstream", vllm]
            children.start(name, [*COUNTERSIGN, *serve])
        children.start("proxy", [*COUNTERSIGN, "serve", "--config", str(config)])
        worker = children.start(
            "worker", [*COUNTERSIGN, "worker", "--config", str(config)], servers.environment(engines=2)
        )
        url = f"http://127.0.0.1:{port}"
        ready = {
            "the proxy": answers(url + "/readyz"),
            "the worker": lambda: "ready: taking verifications" in worker.log.read_text(),
            **{f"the cheat {name}": answers(f"{there}/v1/models") for name, there in at.items()},
        }
        children.wait(ready, 1200, lambda missing: None)
        product = Product(url, webhooks)
        try:
            yield product
            children.check()
        finally:
            product.close()
