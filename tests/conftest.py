"""What the end-to-end tests share: the demo's models, one real vLLM server and one real Valkey for the whole session.

A server takes about half a minute to start, so nothing here starts before a test asks for it. While developing,
TEST_VLLM_URL names one that runs already, with the flags of `SERVER_FLAGS`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import redis.utils
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default
from hypothesis import settings

from benchmarks.demo import models, servers
from benchmarks.demo.processes import Children, answers, free_ports
from tests.support.standstill import Again
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE

# How long an example takes says more about what else the machine does than about the example.
settings.register_profile("countersign", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("TEST_EXAMPLES", "countersign"))

# Reading the certificates that nobody here shows takes longer than most tests of the proxy.
default.create_ssl_context = cache(default.create_ssl_context)  # type: ignore[attr-defined]

# Each connection to Redis says whose it is, and looks it up in the installed files.
redis.utils.get_lib_version = cache(redis.utils.get_lib_version)

# A client that says nothing of it waits for as long as the slowest machine may need.
for _what in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _what, PATIENCE)

SERVER_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def pytest_configure(config: pytest.Config) -> None:
    """What fails while the machine stands still is run again."""
    config.pluginmanager.register(Again(), "countersign-again")


@pytest.fixture(scope="session")
def demo_models() -> models.DemoModels:
    """The demo's models, built into the user's cache the first time."""
    return models.ensure(say=lambda text: print(f"[models] {text}"))


@pytest.fixture(scope="session")
def model_dir(demo_models: models.DemoModels) -> Path:
    """Folder of the bf16 model."""
    return demo_models.bf16


@pytest.fixture(scope="session")
def fp8_dir(demo_models: models.DemoModels) -> Path:
    """Folder of the copy whose weights went through FP8."""
    return demo_models.fp8


@pytest.fixture(scope="session")
def vllm_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL (without /v1) of a real vLLM server with the bf16 model, called `smollm2`."""
    running = os.environ.get("TEST_VLLM_URL")
    if running:
        yield running.rstrip("/")
        return
    (port,) = free_ports(1)
    with Children(tmp_path_factory.mktemp("vllm")) as children:
        command = servers.command(model_dir, port, flags=SERVER_FLAGS)
        children.start("vllm", command, servers.environment(engines=2))
        url = f"http://127.0.0.1:{port}"
        children.wait({"vLLM": answers(url + "/v1/models")}, 1200, lambda missing: None)
        yield url


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """URL of a real Valkey."""
    with Valkey() as server:
        yield server.url
