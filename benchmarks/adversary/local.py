"""CPU servers with the demo's models, for attacks that need a server of their own and were given none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.adversary.base import Cheat
from benchmarks.adversary.servers import Site
from benchmarks.demo import models, servers
from benchmarks.demo.processes import Child, Children, answers, free_ports

START_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to serve one attack's model: its weights, tokens per batch, flags and threads."""

    weights: str
    batched_tokens: int = 2048
    flags: tuple[str, ...] = ()
    threads: int | None = None


RECIPES = {
    "fp8": Recipe("fp8"),
    "int8": Recipe("int8"),
    "int4": Recipe("int4"),
    "layer-dropped": Recipe("layer-dropped"),
    "other": Recipe("other"),
    "honest-chunked": Recipe("bf16", batched_tokens=64),
    # Fewer threads split the same sums otherwise.
    "honest-kernel": Recipe("bf16", threads=1),
}
"""None for `honest-speculative`: vLLM 0.32's CPU runner is not lossless there (see its `limits`)."""


def start(children: Children, attack: type[Cheat], say: Callable[[str], None]) -> tuple[Site, Child]:
    """Build the weights where needed and start their server. Raises CountersignError."""
    recipe = RECIPES[attack.name]
    (port,) = free_ports(1)
    command = servers.command(
        models.variant(recipe.weights, say=say), port, batched_tokens=recipe.batched_tokens, flags=recipe.flags
    )
    environ = servers.environment(engines=2)
    if recipe.threads is not None:
        environ["OMP_NUM_THREADS"] = str(recipe.threads)
    child = children.start(attack.name, command, environ)
    url = f"http://127.0.0.1:{port}"
    children.wait({attack.name: answers(url + "/v1/models")}, START_SECONDS, lambda missing: say("its server starts"))
    return Site(url, servers.MODEL), child
