"""A backend's key goes to that backend alone: whoever quotes it in an answer, its client does not read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policies.settings import BackendSettings
from proxy.relay.headers import client_headers
from proxy.relay.secret import secret_of
from tests.proxy.conftest import MESSAGES, Rig, rigged
from tests.support import wire
from tests.support.fake_backend import FakeBackend
from tests.support.valkey import Valkey

KEY = 'sk-Back/end"Secret<0123456789>'
QUOTED = json.dumps(KEY)[1:-1]
CHAT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/responses", "/v1/embeddings"
SPELLINGS = {
    "plain": QUOTED,
    "slashes": QUOTED.replace("/", "\\/"),
    "html": QUOTED.replace("<", "\\u003c").replace(">", "\\u003E"),
    "escapes": "".join(f"\\u{ord(letter):04x}" for letter in KEY),
}


def _with_key(url: str, key: str = KEY) -> dict[str, Any]:
    backend = {"name": "b1", "url": url, "model": "m", "served_model": "served", "api_key": key}
    return {"backends": [backend], "breaker": {"failures": 1000}}


def _rig(make_rig: Callable[..., Rig], key: str = KEY) -> Rig:
    url = make_rig().backend.url
    return make_rig(**_with_key(url, key))


@pytest.fixture(scope="module")
def lasting(valkey: Valkey) -> Iterator[Rig]:
    """As its namesake, of a backend with the key."""
    with FakeBackend() as own, rigged(own, valkey, **_with_key(own.url)) as rig:
        yield rig


def _asked(rig: Rig, path: str, **fields: Any) -> Any:
    return rig.http.post(path, json={"model": "m", "messages": MESSAGES, "input": "x"} | fields)


def _error(text: str) -> bytes:
    return b'{"error":{"message":"Incorrect key: %s!","type":"x","param":null,"code":"y"}}' % text.encode()


@pytest.mark.parametrize("path", [CHAT, RESPONSES, EMBEDDINGS])
def test_headers(make_rig: Callable[..., Rig], path: str) -> None:
    rig = _rig(make_rig)
    never = ("authorization", "x-api-key", "api-key", "api_key", "proxy-authorization", "proxy-status", "proxy_x")
    quoting = [
        f"{name}: {value}" for name in ("x-echo", "x-request-id") for value in (KEY, f"Bearer {KEY}", f"a{KEY}b")
    ]
    extra = [f"{name}: abc" for name in never] + quoting + ["x-kept: sk-Back"]
    for status, body, kind in (
        (401, _error("none"), "application/json"),
        (200, wire.BODY, "application/json"),
        (200, b"".join(wire.FRAMES), "text/event-stream"),
    ):
        rig.backend.script = [wire.whole(body, status, kind, *extra)]
        said = _asked(rig, path, stream=kind != "application/json")
        assert said.status_code == status
        assert not set(never) & set(said.headers)
        assert KEY not in str(said.headers.raw)
        assert said.headers["x-kept"] == "sk-Back"
        assert said.headers["x-request-id"] == said.headers["x-countersign-id"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("coding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("streamed", [False, True])
def test_errors(shared: Rig, spelling: str, coding: str, path: str, streamed: bool) -> None:
    for kind in ("application/json", "text/plain"):
        body = _error(SPELLINGS[spelling]).decode().encode(coding)
        shared.backend.script = [wire.whole(body, 401, kind)]
        said = _asked(shared, path, stream=streamed)
        assert said.status_code == 401
        message = json.loads(said.content)["error"]["message"]
        assert message.startswith("Incorrect key: *")
        assert message.endswith("*!")
        assert "Back" not in message


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("first", [True, False])
def test_errors_of_streams(make_rig: Callable[..., Rig], path: str, first: bool) -> None:
    rig = _rig(make_rig)
    start = b"" if first else wire.ROLE
    rig.backend.script = [wire.whole(start + b"data: " + _error(QUOTED) + b"\n\n", 200, "text/event-stream")]
    said = _asked(rig, path, stream=True)
    assert b"Incorrect key: ***!" in said.content
    assert b"Back" not in said.content


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_streams(make_rig: Callable[..., Rig], path: str) -> None:
    """In frames, in comments, in pages; and where what is like the frame before is passed on at once."""
    key = b"sk-0123456789abcdef"
    rig = _rig(make_rig, key.decode())
    frames = [frame.replace(b'"created"', b'"debug": "Bearer %s", "created"' % key, 1) for frame in wire.FRAMES[:-1]]
    for kind in ("text/event-stream", "text/plain"):
        comment = b": authorization: %s\n\n" % key
        rig.backend.script = [wire.head(200, kind, "transfer-encoding: chunked")]
        rig.backend.script += [step for each in (*frames, comment, wire.DONE) for step in (wire.chunk(each), 0.01)]
        rig.backend.script += [wire.LAST_CHUNK]
        said = _asked(rig, path, stream=True)
        assert said.content.count(b"***") == len(frames) + 1 - (path == CHAT)
        assert key not in said.content
        if path == CHAT:
            assert rig.evidence(said.headers["x-countersign-id"]).faults == ()
    rig.backend.script = [wire.whole(b"<html>\n%s\n</html>" % key, 200, "text/html")]
    assert key not in _asked(rig, path, stream=True).content


@pytest.mark.parametrize("path", [RESPONSES, EMBEDDINGS, CHAT])
def test_bodies_that_are_held(make_rig: Callable[..., Rig], path: str) -> None:
    key = "sk-0123456789abcdef"
    rig = _rig(make_rig, key)
    for kind in ("application/json", "text/plain"):
        body = wire.BODY if path == CHAT else b'{"object":"list","data":[]}'
        body = b'{"debug":"Bearer %s",' % key.encode() + body[1:]
        rig.backend.script = [wire.whole(body, 200, kind if path != CHAT else "application/json")]
        said = _asked(rig, path)
        assert said.status_code == 200
        assert key not in said.text
        assert said.json()["debug"] in ("Bearer ***", None)


@pytest.mark.parametrize("path", [RESPONSES, CHAT])
def test_a_key_that_is_a_word_is_no_secret_in_an_answer(make_rig: Callable[..., Rig], path: str) -> None:
    rig = _rig(make_rig, "EMPTY")
    body = wire.BODY.replace(b"One", b"EMPTY")
    rig.backend.script = [wire.whole(body)]
    before = _asked(rig, path).content
    assert b"EMPTY" in before
    rig.backend.script = [wire.whole(_error("EMPTY"), 401)]
    assert b"EMPTY" not in _asked(rig, path).content


def test_without_a_key_nothing_is_one() -> None:
    secret = secret_of(BackendSettings(name="b", url="http://b", model="m").api_key)
    assert secret.mask(b"abc\\u0000", error=True) == b"abc\\u0000"
    assert client_headers([(b"x", b"")], secret) == [(b"x", b"")]
