"""What a response that was closed leaves behind."""

from __future__ import annotations

import asyncio
import gc

import pytest

from policies.errors import UpstreamFailed
from policies.settings import TimeoutSettings
from proxy.relay.transport import AiohttpResponse, AiohttpTransport, UpstreamRequest
from tests.support import wire
from tests.support.fake_backend import FakeBackend
from tests.support.waiting import PATIENCE

TIMES = 20


def _held() -> int:
    gc.collect()
    return sum(isinstance(each, AiohttpResponse) for each in gc.get_objects())


@pytest.mark.parametrize("while_reading", [False, True])
async def test_reading_what_was_closed_keeps_nothing(while_reading: bool) -> None:
    before = _held()
    with FakeBackend() as backend:
        backend.script = lambda _: [wire.SSE_HEAD, PATIENCE]
        transport = AiohttpTransport(TimeoutSettings())
        try:
            for _ in range(TIMES):
                response = await transport.send(UpstreamRequest(backend.url + "/v1/chat/completions", [], b"{}"))
                if while_reading:
                    asyncio.get_running_loop().call_soon(response.close)
                else:
                    response.close()
                with pytest.raises(UpstreamFailed):
                    await response.read()
                del response
        finally:
            await transport.close()
    await asyncio.sleep(0)
    assert _held() == before
