"""The gateway under test: our own by default, or any other that forwards to our scripted upstream.

    pytest tests/fidelity --base-url http://127.0.0.1:4000 --upstream-port 9100

The other gateway must offer the model `--model` (default `m`) from `http://127.0.0.1:9100/v1`, where it has the same
name, and take the key `--client-key`. Cases that need it set up otherwise take a `--variant NAME=URL`; one that is not
given fails, as does a case for which a gateway has no feature.

    impatient   gives up: connecting 0.5 s, first token 0.6 s, between tokens 0.6 s, all 4 s
    keepalive   sends comments after 0.2 s of silence
    pair        has a second upstream at port + 1 and asks it when the first fails
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fidelity.gateway import CLIENT_KEY, MODEL, Gateway, Gateways
from tests.support.fake_backend import FakeBackend
from tests.support.valkey import Valkey


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    group = parser.getgroup("fidelity")
    group.addoption("--base-url", help="gateway to test instead of our own")
    group.addoption("--upstream-port", type=int, default=0, help="port of the scripted upstream it forwards to")
    group.addoption("--model", default=MODEL, help="name of the model there")
    group.addoption("--client-key", default=CLIENT_KEY, help="key it takes")
    group.addoption("--variant", action="append", default=[], metavar="NAME=URL", help="the same, set up otherwise")
    group.addoption("--cases", action="store_true", help="say of each case how many of its tests failed")
    group.addoption("--gateway-pid", type=int, help="its process, for memory and signals")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "cases(*numbers): the fidelity cases that a test covers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reports know the cases of their tests."""
    for item in items:
        item.user_properties += [("cases", mark.args) for mark in item.iter_markers("cases")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How each case came out, where somebody wants to know."""
    if not config.getoption("--cases", False):
        return
    outcomes: dict[int, list[bool]] = {}
    for word in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(word, []):
            for name, numbers in report.user_properties:
                for number in numbers if name == "cases" else ():
                    outcomes.setdefault(number, []).append(word == "passed")
    kept = sum(all(passed) for passed in outcomes.values())
    terminalreporter.section(f"{kept} of {len(outcomes)} fidelity cases hold")
    for number, passed in sorted(outcomes.items()):
        if not all(passed):
            terminalreporter.write_line(f"case {number}: {passed.count(False)} of {len(passed)} tests fail")


@pytest.fixture(scope="session")
def upstreams(request: pytest.FixtureRequest) -> Iterator[tuple[FakeBackend, FakeBackend]]:
    """Two scripted upstreams."""
    port = request.config.getoption("--upstream-port", 0)
    models = b'{"object": "list", "data": [{"id": "%s", "object": "model"}]}' % MODEL.encode()
    pages = {b"/v1/models": models, b"/health": b"{}", b"/healthz": b"{}"}
    with FakeBackend(port=port, pages=pages) as one, FakeBackend(port=port and port + 1, pages=pages) as two:
        yield one, two


@pytest.fixture(scope="session")
def gateways(
    request: pytest.FixtureRequest, upstreams: tuple[FakeBackend, FakeBackend], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateways]:
    """The gateway, plain and set up otherwise."""
    option = request.config.getoption
    folder: Path = tmp_path_factory.mktemp("gateways")
    urls = [upstream.url for upstream in upstreams]
    if (url := option("--base-url", None)) is not None:
        given = dict(item.split("=", 1) for item in option("--variant"))
        main = Gateway(url.rstrip("/").removesuffix("/v1"), option("--model"), option("--client-key"))
        main.pid = option("--gateway-pid")
        yield Gateways(main, urls, folder, None, given)
        return
    with Valkey() as valkey:
        found = Gateways(None, urls, folder, valkey, {})
        try:
            yield found
        finally:
            found.stop()


@pytest.fixture
def gateway(gateways: Gateways, upstream: FakeBackend) -> Gateway:
    """The gateway, plain."""
    return gateways.main


@pytest.fixture
def upstream(upstreams: tuple[FakeBackend, FakeBackend]) -> Iterator[FakeBackend]:
    """The first upstream, without script and memory."""
    for each in upstreams:
        each.reset()
    yield upstreams[0]
    for each in upstreams:
        each.reset()


@pytest.fixture
def second(upstreams: tuple[FakeBackend, FakeBackend], upstream: FakeBackend) -> FakeBackend:
    """The second upstream."""
    return upstreams[1]
