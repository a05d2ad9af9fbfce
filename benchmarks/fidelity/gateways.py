"""The gateways: how each is set up for the suite, and what it is known not to have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLIENT_KEY = "sk-client-4b1d"
BACKEND_KEY = "sk-backend-9f3e"

Start = Callable[[Path, str, int, int], Sequence[str]]
"""The command that starts a variant, from: a folder for files, the variant, its port, the upstream's port."""


@dataclass(frozen=True)
class Plan:
    """One gateway.

    Attributes:
        name: as the page has it.
        binary: the executable, of an environment of its own; empty for our own proxy, which the suite starts itself.
        variants: those it can be set up as, besides `plain`.
        start: how one is started.
        version: how it tells its version.
        readiness: path that says whether it serves.
        options: further options of the suite.
        lacks: features it does not have, and where that is known from.
        remarks: what else a reader should know of how it was run.
    """

    name: str
    binary: str = ""
    variants: tuple[str, ...] = ()
    start: Start | None = None
    version: Callable[[], str] = lambda: ""
    readiness: str = "/readyz"
    options: tuple[str, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


ABSENT: dict[str, str] = {
    "vLLM production-stack router": "not run: there is no wheel of it (the package index has `vllm-router` of the Rust "
    "router only, and nothing named after production-stack)",
}


def ours() -> Plan:
    """This proxy."""
    return Plan("Countersign")


def litellm(binary: str) -> Plan:
    """LiteLLM's proxy, one worker, no database."""
    return Plan(
        name="LiteLLM",
        binary=binary,
        variants=("impatient", "keepalive", "pair", "unreachable", "ending", "breaker"),
        start=lambda folder, variant, port, upstream: [
            *(binary, "--config", str(_litellm_config(folder, variant, upstream))),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        version=lambda: _distribution(binary, "litellm"),
        readiness="/health/readiness",
        options=(
            *("--keepalive", "1"),
            *("--path-model", "/v1/responses=m-responses"),
            *("--path-model", "/v1/messages=m-messages"),
        ),
        lacks={
            "record": "keeps no record of what it sent that could be looked up without a database",
            "body limit": "`max_request_size_mb` is of the paid edition",
            "line limit": "no setting",
            "connect time-out": "`timeout` and `stream_timeout` only",
            "idle time-out": "`timeout` and `stream_timeout` only",
            "total time-out": "`timeout` and `stream_timeout` only",
        },
        remarks=(
            "Chat, completions and embeddings go to `hosted_vllm/m`, Responses to `openai/m`, Messages to "
            "`anthropic/m`, so that each is passed to an endpoint of its kind.",
            "Retries are off, except in the variant `pair`, and cooldowns, except in `breaker`; `cancel_on_disconnect` "
            "is on; comments come after 1 s, the least it takes.",
            "Its text-completion streams have an event more than was said; that alone is wrong in cases 57 and 60.",
            "1.110.2 is its newest release; its extra `proxy` names packages of that release that the package index "
            "does not carry, so what else the extra names was installed, with `litellm-proxy-extras` 0.4.110 and "
            "`litellm-enterprise` 0.1.79.post1. The newest whose extra installs as it is is 1.108.7.",
        ),
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", **_REPEATS},
    )


# Else a stream that says the same a hundred times in a row is broken off, which some tests do.
_REPEATS = {"REPEATED_STREAMING_CHUNK_LIMIT": "100000000"}


def _litellm_config(folder: Path, variant: str, upstream: int) -> Path:
    """Its settings; JSON is YAML."""
    ports = {"pair": [upstream, upstream + 1], "unreachable": [upstream + 2]}.get(variant, [upstream])
    times = {"timeout": 0.6, "stream_timeout": 0.6} if variant in ("impatient", "unreachable") else {}
    pings = {"keepalive_seconds": 1} if variant == "keepalive" else {}

    def model(name: str, provider: str, port: int, base: str = "/v1") -> dict[str, Any]:
        target = {"model": f"{provider}/m", "api_base": f"http://127.0.0.1:{port}{base}", "api_key": BACKEND_KEY}
        return {"model_name": name, "litellm_params": target | times | pings}

    retries = 2 if variant == "pair" else 0
    config = {
        "model_list": [
            *(model("m", "hosted_vllm", port) for port in ports),
            model("m-responses", "openai", ports[0]),
            model("m-messages", "anthropic", ports[0], base=""),
        ],
        "litellm_settings": {"num_retries": retries, "request_timeout": 600},
        "general_settings": {"master_key": CLIENT_KEY, "cancel_on_disconnect": True},
        "router_settings": {"disable_cooldowns": variant != "breaker", "num_retries": retries},
    }
    path = folder / f"{variant}.yaml"
    path.write_text(json.dumps(config, indent=1))
    return path


def vllm_router(binary: str) -> Plan:
    """vLLM's router in Rust."""
    return Plan(
        name="vllm-router",
        binary=binary,
        variants=("impatient", "pair", "ending", "breaker"),
        start=lambda folder, variant, port, upstream: _vllm_router_command(binary, variant, port, upstream),
        version=lambda: _distribution(binary, "vllm-router"),
        readiness="/readiness",
        lacks={
            "record": "keeps none",
            "client keys": "passes the client's `authorization` on; has no keys of its own",
            "keepalive": "no setting",
            "line limit": "no setting",
            "reads streams": "passes them through unread",
            "connect time-out": "`--request-timeout-secs` only",
            "first-token time-out": "`--request-timeout-secs` only",
            "idle time-out": "`--request-timeout-secs` only",
        },
        remarks=(
            "Retries are off, except in the variant `pair`, and the circuit breaker, except in `breaker`, so that no "
            "test meets what an earlier one broke. `impatient` has `--request-timeout-secs 4`, its only time-out.",
        ),
    )


def _vllm_router_command(binary: str, variant: str, port: int, upstream: int) -> list[str]:
    workers = [f"http://127.0.0.1:{upstream + at}" for at in range(2 if variant == "pair" else 1)]
    command = [binary, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers]
    command += ["--policy", "round_robin", "--api-key", BACKEND_KEY, "--max-payload-size", str(64 * 1024**2)]
    command += ["--worker-startup-check-interval", "1", "--prometheus-port", str(port + 1000)]
    command += ["--log-level", "error", *([] if variant == "breaker" else ["--disable-circuit-breaker"])]
    if variant == "pair":
        return [*command, "--retry-max-retries", "3", "--retry-initial-backoff-ms", "1"]
    return [*command, "--disable-retries", *(["--request-timeout-secs", "4"] if variant == "impatient" else [])]


def _distribution(binary: str, package: str) -> str:
    """The version of a package beside an executable, and that of its Python."""
    python = Path(binary).parent / "python"
    code = f"import importlib.metadata as m, platform as p; print(m.version({package!r}), 'Python', p.python_version())"
    run = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def our_version() -> str:
    """Python's; which commit of the proxy ran is in the machine's description."""
    return f"Python {sys.version.split()[0]}"
