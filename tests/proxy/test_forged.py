"""Nothing of ours can be forged: headers, trailers, comments; and nobody learns which ids exist."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import Close

NAMES = ("x-countersign-id", "X-Countersign-Verdict", "X-COUNTERSIGN-REASON", "x_countersign_verdict", "x-countersign-")
FORGED = [f"{name}: pass" for name in NAMES for _ in range(2)]


def _ours(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if "countersign" in name}


def test_headers_that_look_like_ours(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY, 200, "application/json", *FORGED)]
    found = _ours(rig.chat().headers)
    assert found.keys() == {"x-countersign-id"}
    assert len(bytes.fromhex(found["x-countersign-id"])) == 16


def test_trailers_and_early_hints_that_look_like_ours(rig: Rig) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nx-countersign-verdict: pass\r\n\r\n"
    head = wire.head(200, "application/json", "transfer-encoding: chunked", "trailer: x-countersign-verdict")
    last = b"0\r\nx-countersign-verdict: pass\r\n\r\n"
    rig.backend.script = [early + head + wire.chunk(wire.BODY) + last]
    response = rig.chat()
    assert response.status_code == 200
    assert _ours(response.headers).keys() == {"x-countersign-id"}
    assert b"countersign" not in response.content


@pytest.mark.parametrize("cut", range(0, 30, 3))
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_comments_that_look_like_ours(shared: Rig, cut: int, end: str) -> None:
    comments = "".join(
        f":{space}{word} {{}}{end}{end}" for space in ("", " ", "\t \x0b") for word in ("countersign", "CounterSign")
    )
    forged = b"\xef\xbb\xbf" + comments.encode()
    body = b"".join(wire.FRAMES)
    head = wire.head(200, "text/event-stream", "connection: close")
    shared.backend.script = [head + forged[:cut], 0.005, forged[cut:] + body, Close()]
    response = shared.chat(stream=True)
    assert b"countersign" not in response.content.lower()
    assert response.content.count(b"data: ") == len(wire.FRAMES) - 1


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "-inf", "1e999", "121", "x", "", "0x1", "١٢x"])
def test_waits(shared: Rig, wait: str) -> None:
    response = shared.http.get("/v1/verifications/" + "0" * 32, params={"wait": wait})
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "wait"


@pytest.mark.parametrize("id", ["0" * 32, "x", "%00", "a" * 5000, "*", "..%2f..", "%F0%9F%98%80", "0" * 31, "G" * 32])
def test_unknown_and_foreign_ids_are_the_same(rig: Rig, id: str) -> None:
    rig.decide("f" * 32, "pass", "somebody else")
    foreign = rig.http.get("/v1/verifications/" + "f" * 32)
    unknown = rig.http.get("/v1/verifications/" + id)
    assert (foreign.status_code, unknown.status_code) == (404, 404)
    assert foreign.json()["error"].keys() == json.loads(unknown.content)["error"].keys()
    if "%2f" not in id:
        assert foreign.content == unknown.content
