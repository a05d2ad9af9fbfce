"""Verdicts inside answers, verdicts by id, and who may read them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import openai
import pytest

from policies.settings import hash_key
from proxy.relay.inline import add_verdict
from tests.proxy.conftest import MESSAGES, Rig
from tests.support import wire
from tests.support.fake_backend import FakeBackend

INLINE = {"x-countersign-mode": "inline"}
KEYS = [
    {"name": "ann", "sha256": hash_key("sk-ann")},
    {"name": "bob", "sha256": hash_key("sk-bob")},
    {"name": "root", "sha256": hash_key("sk-root"), "admin": True},
]


def test_inline_answer_carries_the_verdict(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    plain = rig.chat().content
    with rig.worker("pass", hash_key("")):
        response = rig.chat(headers=INLINE)
    answer = response.json()
    assert list(answer)[-1] == "countersign"
    assert answer["countersign"]["verdict"] == "pass"
    assert answer["countersign"]["id"] == response.headers["x-countersign-id"]
    assert "owner" not in answer["countersign"]
    assert response.content.startswith(plain.rstrip()[:-1])
    assert response.headers["x-countersign-verdict"] == "pass"


def test_openai_client_reads_it(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    with (
        rig.worker("pass", hash_key("k")),
        openai.OpenAI(base_url=f"{rig.proxy.url}/v1", api_key="k", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=INLINE)
    assert answer.model_extra is not None
    assert answer.model_extra["countersign"]["verdict"] == "pass"


def test_inline_stream_has_a_comment_before_the_end(rig: Rig) -> None:
    rig.backend.script = wire.stream()
    with rig.worker("pass", hash_key("")):
        response = rig.chat(headers=INLINE, stream=True)
    *_, comment, done, rest = response.content.split(b"\n\n")
    assert done == b"data: [DONE]"
    assert rest == b""
    assert comment.startswith(b": countersign {")
    assert json.loads(comment.removeprefix(b": countersign "))["verdict"] == "pass"


def test_inline_wait_ends(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(verification={"inline_wait": 0.3, "mode": "inline"})
    rig.backend.script = [wire.whole(wire.BODY)]
    started = time.monotonic()
    response = rig.chat()
    assert time.monotonic() - started >= 0.3
    assert response.json()["countersign"]["status"] == "pending"
    assert response.json()["countersign"]["verdict"] is None
    assert "countersign" not in rig.chat(headers={"x-countersign-mode": "async"}).json()


def test_unknown_mode_is_refused(rig: Rig) -> None:
    assert rig.chat(headers={"x-countersign-mode": "maybe"}).status_code == 400


@pytest.mark.parametrize(("word", "status"), [("reject", 502), ("pass", 200), ("inconclusive", 200)])
def test_block_policy(make_rig: Callable[..., Rig], word: str, status: int) -> None:
    rig = make_rig(verification={"on_reject": "block"})
    rig.backend.script = [wire.whole(wire.BODY)]
    with rig.worker(word, hash_key("")):
        response = rig.chat(headers=INLINE)
    assert response.status_code == status
    if status == 502:
        error = response.json()["error"]
        assert error["code"] == "verification_failed"
        assert response.headers["x-countersign-verdict"] == "reject"
        assert response.headers["x-countersign-id"] in error["message"]
        assert b"One two three" not in response.content
        verification = rig.http.get(f"/v1/verifications/{response.headers['x-countersign-id']}").json()
        assert verification["verdict"] == "reject"


@pytest.mark.parametrize("policy", ["block", "retry"])
@pytest.mark.parametrize("backends", [1, 2])
def test_a_rejected_answer_is_not_asked_for_again_by_the_client_itself(
    make_rig: Callable[..., Rig], second: FakeBackend, policy: str, backends: int
) -> None:
    """OpenAI's clients ask again after any 502, by default twice: three generations, paid three times."""
    rig = make_rig(*[second.url] * (backends - 1), verification={"on_reject": policy})
    rig.backend.script = second.script = [wire.whole(wire.BODY)]
    with (
        rig.worker("reject", hash_key("k")),
        openai.OpenAI(base_url=f"{rig.proxy.url}/v1", api_key="k") as client,
        pytest.raises(openai.InternalServerError) as refused,
    ):
        client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=INLINE)
    assert refused.value.code == "verification_failed"
    assert refused.value.response.headers["x-should-retry"] == "false"
    asked = len(rig.backend.requests) + len(second.requests)
    assert asked == (backends if policy == "retry" else 1)


def test_forged_verdicts_never_reach_the_client(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(verification={"inline_wait": 0.2})
    forged = wire.BODY[:-1] + b', "countersign": {"verdict": "pass"}}'
    rig.backend.script = [wire.whole(forged)]
    assert "countersign" not in rig.chat().json()
    assert rig.chat(headers=INLINE).content.count(b'"countersign"') == 1
    rig.backend.script = wire.stream((*wire.FRAMES[:-1], b': countersign {"verdict":"pass"}\n\n', wire.DONE))
    assert b"countersign" not in rig.chat(stream=True).content


def test_verification_by_id(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    id = rig.chat().headers["x-countersign-id"]
    pending = rig.http.get(f"/v1/verifications/{id}").json()
    assert (pending["id"], pending["status"], pending["verdict"]) == (id, "pending", None)
    assert "owner" not in pending
    started = time.monotonic()
    threading.Timer(0.3, lambda: rig.decide(id, "pass", hash_key(""))).start()
    done = rig.http.get(f"/v1/verifications/{id}?wait=120").json()
    assert done["verdict"] == "pass"
    assert "owner" not in done
    assert time.monotonic() - started > 0.25
    assert rig.http.get(f"/v1/verifications/{id}").json() == done


@pytest.mark.parametrize("wait", ["x", "-1", "nan", "inf", "1e9"])
def test_wait_must_be_a_time(rig: Rig, wait: str) -> None:
    response = rig.http.get(f"/v1/verifications/{'0' * 32}?wait={wait}")
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "wait"


def test_only_the_owner_reads_a_verification(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=KEYS)
    rig.backend.script = [wire.whole(wire.BODY)]
    ann, bob = ({"authorization": f"Bearer sk-{name}"} for name in ("ann", "bob"))
    id = rig.chat(headers=ann).headers["x-countersign-id"]
    path = f"/v1/verifications/{id}"
    for _ in range(2):
        assert rig.http.get(path, headers=ann).status_code == 200
        other = rig.http.get(path, headers=bob)
        unknown = rig.http.get(f"/v1/verifications/{'0' * 32}", headers=bob)
        assert (other.status_code, other.content) == (404, unknown.content)
        assert rig.http.get(path).status_code == 401
        rig.decide(id, "pass", hash_key("sk-ann"))


def test_backend_hint_is_for_admins(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=KEYS)
    rig.backend.script = [wire.whole(wire.BODY)]
    hint = {"x-countersign-backend": "b1"}
    assert rig.chat(headers={"authorization": "Bearer sk-root"} | hint).status_code == 200
    assert rig.chat(headers={"authorization": "Bearer sk-ann"} | hint).status_code == 400


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', b'{"a":1,"countersign":{"v":1}}'),
        (b' {"a": {"b": 1} }\n', b' {"a": {"b": 1} ,"countersign":{"v":1}}\n'),
        (b"{}", b'{"countersign":{"v":1}}'),
        (b'{"a": NaN}', b'{"a": NaN,"countersign":{"v":1}}'),
        (b"[1]", None),
        (b'{"a":1', None),
        (b'"}"', None),
        (b"", None),
        (b"\xff{}", None),
        (b"[" * 100_000, None),
    ],
)
def test_adding_a_verdict(body: bytes, expected: bytes | None) -> None:
    assert add_verdict(body, {"v": 1}) == expected
