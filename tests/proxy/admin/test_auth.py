"""Who is let into the admin API."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import AuthenticationFailed, RateLimited, SettingsError
from policies.settings import AdminKey, hash_key, parse_settings
from proxy.admin.auth import AdminKeys, Failures
from tests.proxy.admin.conftest import BOSS, EYE, KEYS, House
from tests.support.fake_backend import FakeBackend

HERE, AWAY = ("127.0.0.1", 1), ("192.0.2.7", 1)
HOST = {b"host": b"127.0.0.1:8701"}
STORED = [AdminKey.model_validate(key) for key in KEYS]


def with_key(text: bytes) -> dict[bytes, bytes]:
    return HOST | {b"authorization": b"Bearer " + text}


def test_a_key_lets_in_from_anywhere_and_says_what_it_may() -> None:
    boss = AdminKeys().authenticate(STORED, with_key(b"ak-boss"), AWAY)
    assert (boss.name, boss.actor, boss.read_only) == ("boss", "key:boss", False)
    assert AdminKeys().authenticate(STORED, with_key(b"ak-eye"), HERE).read_only


@given(st.binary(max_size=600))
def test_nothing_else_does(text: bytes) -> None:
    if text.strip() in (b"ak-boss", b"ak-eye"):
        return
    with pytest.raises(AuthenticationFailed, match=r"^no valid"):
        AdminKeys().authenticate(STORED, with_key(text), HERE)


@pytest.mark.parametrize(
    ("headers", "peer"),
    [
        (HOST, AWAY),
        (HOST, None),
        ({}, HERE),
        ({b"host": b"evil.example"}, HERE),
        (HOST | {b"x-forwarded-for": b"127.0.0.1"}, HERE),
        (HOST | {b"origin": b"http://evil.example"}, HERE),
        (HOST | {b"origin": b"null"}, HERE),
    ],
)
def test_without_keys_only_this_machine_is_served(headers: dict[bytes, bytes], peer: tuple[str, int] | None) -> None:
    assert AdminKeys().authenticate([], HOST, HERE).actor.startswith("local@")
    assert AdminKeys().authenticate([], HOST | {b"host": b"[::1]"}, ("::1", 1)).name == "this machine"
    with pytest.raises(AuthenticationFailed):
        AdminKeys().authenticate([], headers, peer)
    with pytest.raises(AuthenticationFailed):
        AdminKeys().authenticate(STORED, HOST, HERE)


def test_an_address_that_guesses_has_to_wait_and_the_right_key_does_not() -> None:
    now = [100.0]
    keys = AdminKeys(Failures(lambda: now[0]))
    for _ in range(10):
        with pytest.raises(AuthenticationFailed):
            keys.authenticate(STORED, with_key(b"wrong"), AWAY)
    for _ in range(100):
        with pytest.raises(RateLimited) as refused:
            keys.authenticate(STORED, with_key(b"wrong"), AWAY)
        assert refused.value.retry_after == 60
        assert keys.authenticate(STORED, with_key(b"ak-boss"), AWAY).name == "boss"
    with pytest.raises(AuthenticationFailed):
        keys.authenticate(STORED, with_key(b"wrong"), HERE)
    now[0] += 60.1
    with pytest.raises(AuthenticationFailed):
        keys.authenticate(STORED, with_key(b"wrong"), AWAY)


def test_a_subscriber_has_one_address_and_many_are_forgotten_in_turn() -> None:
    failures = Failures(lambda: 0.0)
    for n in range(10):
        failures.note(f"2001:db8:0:1::{n:x}")
    assert failures.wait("2001:db8:0:1:ffff::1") > 0
    assert failures.wait("2001:db8:0:2::1") == 0
    for n in range(11_000):
        failures.note(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}")
    assert len(failures._times) == 10_000


def test_over_http_it_is_the_same(house: House) -> None:
    url = house.proxy.admin_url
    assert httpx.get(f"{url}/admin/backends").json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{url}/admin/backends", headers={"x-api-key": "ak-eye"}).status_code == 200
    denied = httpx.post(f"{url}/admin/backends/b1/drain", headers=EYE)
    assert (denied.status_code, denied.json()["error"]["code"]) == (403, "permission_denied")
    assert not house.backend()["drained"]
    for _ in range(9):
        assert httpx.get(f"{url}/admin/audit").status_code == 401
    limited = httpx.get(f"{url}/admin/audit", headers={"authorization": "Bearer ak-guess"})
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(limited.headers["retry-after"]) <= 60
    assert httpx.get(f"{url}/admin/audit", headers=BOSS).status_code == 200
    page = house.http.get("/metrics").text
    assert 'countersign_admin_refused_total{reason="invalid_api_key"} 10' in page


def test_a_client_key_is_no_admin_key(open_house: Callable[..., House]) -> None:
    client = {"name": "root", "sha256": hash_key("sk-root"), "admin": True}
    house = open_house(keys=[client])
    root = {"authorization": "Bearer sk-root"}
    assert httpx.get(f"{house.proxy.admin_url}/admin/backends", headers=root).status_code == 401
    assert house.http.get("/v1/models", headers=root).status_code == 200
    assert house.http.get("/v1/models", headers=BOSS).status_code == 401
    with pytest.raises(SettingsError, match="same text"):
        parse_settings(f"{{keys: [{{name: a, sha256: {hash_key('ak-boss')}}}], admin: {{keys: {KEYS}}}}}", {})


@pytest.mark.parametrize("path", ["/v1/backends", "/v1/keys", "/v1/backends/b1/standing", "/admin/backends", "/admin"])
def test_the_public_port_serves_nothing_of_it(house: House, path: str) -> None:
    assert house.http.get(path).status_code == 404
    assert house.http.post(path, json={}).status_code == 404


def test_the_admin_port_relays_nothing(house: House, backend: FakeBackend) -> None:
    for path in ("/v1/chat/completions", "/v1/models", "/metrics", "/readyz"):
        assert house.admin.post(path, json={"model": "m"}).status_code == 404
    assert backend.requests == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{port: 1, host: 0.0.0.0}", "at least one key"),
        ("{port: 1, host: example.com}", "at least one key"),
        ("{port: 1, host: '::ffff:10.0.0.1'}", "at least one key"),
        ("{keys: [{name: a b, sha256: x}]}", "pattern"),
        (f"{{keys: [{KEYS[0]}, {KEYS[0]}]}}", "one name"),
        ("{prot: 1}", "Extra"),
    ],
)
def test_settings_that_would_leave_the_door_open_do_not_start(settings: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as raised:
        parse_settings(f"admin: {settings}", {})
    assert raised.value.key.startswith("admin")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST."])
def test_a_door_on_this_machine_needs_no_key(host: str) -> None:
    assert parse_settings(f"admin: {{port: 1, host: '{host}'}}", {}).admin.port == 1


def test_bodies_are_bounded_and_json(house: House) -> None:
    large = house.admin.post("/admin/backends", json={"name": "x" * 70_000})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    plain = house.admin.post("/admin/backends", content=b"{}", headers={"content-type": "text/plain"})
    assert plain.json()["error"]["message"] == "the content-type is application/json"
    for body in (b"", b"[1]", b"{", b"[" * 5000, b'{"name": "\xff"}'):
        found = house.admin.post("/admin/backends", content=body, headers={"content-type": "application/json"})
        assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")


def test_nothing_of_it_is_kept_on_the_way(house: House) -> None:
    assert house.admin.get("/admin/backends").headers["cache-control"] == "no-store"
    assert house.admin.get("/healthz").json() == {"status": "ok"}
