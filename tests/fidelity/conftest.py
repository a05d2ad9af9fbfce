"""The gateway under test: our own by default, or any other that forwards to our scripted upstream.

    pytest tests/fidelity --base-url http://127.0.0.1:4000 --upstream-port 9100

The other gateway must offer the model `--model` (default `m`) from `http://127.0.0.1:9100/v1`, where it has the same
name, and take the key `--client-key`. Cases that need it set up otherwise take a `--variant NAME=URL`, and `--pid
NAME=PID` where its process matters; a variant that is not given is a feature that is lacking.

    impatient    gives up: connecting 0.5 s, first token 0.6 s, between tokens 0.6 s, all 4 s
    keepalive    sends comments after 0.2 s of silence (or `--keepalive`)
    pair         has a second upstream at port + 1 and asks it when the first fails
    unreachable  impatient, with an upstream at port + 2, where nothing accepts connections
    ending       as it is, to be ended by SIGTERM
    breaker      leaves an upstream alone that fails too often, which it does not in the others

`--timed` also asserts how long things take, which only a machine that does nothing else can be held to; without it
they have to happen, and in their order. `--lacks FEATURE` names what a gateway is known not to have, so that its tests
fail as lacking and not as wrong.
`--outcomes FILE` writes how each test came out; `countersign bench fidelity` makes a page of such files.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fidelity.gateway import CLIENT_KEY, MODEL, Gateway, Gateways, Given
from tests.fidelity.meaning import OtherBytes, notes
from tests.fidelity.outcomes import Outcomes
from tests.fidelity.timing import timing
from tests.support import raw_http
from tests.support.black_hole import BlackHole
from tests.support.fake_backend import FakeBackend
from tests.support.raw_http import PATIENCE
from tests.support.valkey import Valkey


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    group = parser.getgroup("fidelity")
    group.addoption("--base-url", help="gateway to test instead of our own")
    group.addoption("--upstream-port", type=int, default=0, help="port of the scripted upstream it forwards to")
    group.addoption("--model", default=MODEL, help="name of the model there")
    group.addoption("--path-model", action="append", default=[], metavar="PATH=NAME", help="its name on that endpoint")
    group.addoption("--client-key", default=CLIENT_KEY, help="key it takes")
    group.addoption("--variant", action="append", default=[], metavar="NAME=URL", help="the same, set up otherwise")
    group.addoption("--pid", action="append", default=[], metavar="NAME=PID", help="a variant's process")
    group.addoption("--gateway-pid", type=int, help="its process, for memory")
    group.addoption("--keepalive", type=float, default=0.2, help="seconds of silence of the variant keepalive")
    group.addoption("--patience", type=float, default=PATIENCE, help="seconds of silence that a client bears")
    group.addoption("--readiness", default="/readyz", help="path that says whether it takes requests")
    group.addoption("--lacks", action="append", default=[], metavar="FEATURE", help="what it is known not to have")
    group.addoption("--timed", action="store_true", help="assert how long things take, too")
    group.addoption("--cases", action="store_true", help="say of each case how many of its tests failed")
    group.addoption("--outcomes", type=Path, metavar="FILE", help="write how each test came out, a JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and the ledger."""
    config.addinivalue_line("markers", "cases(*numbers): the fidelity cases that a test covers")
    config.addinivalue_line("markers", "feature(name): what a gateway needs for this test and may lack")
    config.addinivalue_line("markers", "timed: asserts how long things take")
    config.addinivalue_line("markers", "ours: what only our own proxy promises")
    raw_http.PATIENCE = config.getoption("--patience", PATIENCE)
    notes.lenient = config.getoption("--base-url", None) is not None
    timing.asserted = config.getoption("--timed", False)
    config.pluginmanager.register(Outcomes(config), "fidelity-outcomes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Another gateway is not asked for what only ours promises, and nobody for what is not asserted."""
    for item in items:
        if item.get_closest_marker("timed") and not timing.asserted:
            item.add_marker(pytest.mark.skip(reason="asserts how long things take: --timed"))
        if notes.lenient and item.get_closest_marker("ours"):
            item.add_marker(pytest.mark.skip(reason="a promise of our own proxy"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    """What was said in other bytes fails the test once it is through."""
    notes.found = []
    result = yield
    if notes.found:
        raise OtherBytes(notes.found[0])
    return result


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
    port = option("--upstream-port", 0)
    with BlackHole(port=port and port + 2) as hole:
        urls = [*(upstream.url for upstream in upstreams), hole.url]
        if (url := option("--base-url", None)) is not None:
            variants = dict(item.split("=", 1) for item in option("--variant"))
            models = dict(item.split("=", 1) for item in option("--path-model"))
            pids = {name: int(pid) for name, pid in (item.split("=", 1) for item in option("--pid"))}
            given = Given(
                urls={"plain": url, **variants},
                pids=pids,
                model=option("--model"),
                models=models,
                key=option("--client-key"),
                pid=option("--gateway-pid"),
            )
            yield Gateways(urls, folder, given=given, keepalive=option("--keepalive"), ready=option("--readiness"))
            return
        with Valkey() as valkey:
            found = Gateways(urls, folder, valkey=valkey)
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
