"""A settings file that changes while requests run."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from policies.settings import hash_key
from proxy import following
from tests.proxy.admin.conftest import BOSS, KEYS, House, eventually, tree_of
from tests.support import wire
from tests.support.fake_backend import FakeBackend, Until
from tests.support.waiting import PATIENCE
from verifier_pool.link.running import RUNNING
from verifier_pool.link.settings_file import SettingsFile


def test_a_changed_file_holds_by_itself(house: House, second: FakeBackend) -> None:
    second.script = [wire.whole(wire.BODY)]
    entry = house.tree["backends"][0]
    house.change(backends=[entry | {"drained": True}, entry | {"name": "b2", "url": second.url}])
    eventually(lambda: house.names() == ["b1", "b2"])
    assert house.chat().status_code == 200
    assert len(second.requests) == 1
    (noted,) = house.audit(action="settings.reload")
    assert (noted["result"], noted["after"]) == (
        "done",
        {"changed": ["backends.b1.drained", "backends.b2"], "restart": []},
    )
    assert noted["actor"].startswith("file:")


def test_keys_and_limits_of_the_file_come_and_go(house: House) -> None:
    assert house.chat().status_code == 200
    house.change(keys=[{"name": "ann", "sha256": hash_key("sk-ann"), "limits": {"requests_per_minute": 1}}])
    eventually(lambda: house.chat().status_code == 401)
    ann = {"authorization": "Bearer sk-ann"}
    asked = {"model": "m", "messages": []}
    codes = [house.http.post("/v1/chat/completions", json=asked, headers=ann).status_code for _ in range(2)]
    assert codes == [200, 429]


def test_admin_keys_of_the_file_come_and_go(house: House) -> None:
    new = {"authorization": "Bearer ak-new"}
    house.change(admin=house.tree["admin"] | {"keys": [{"name": "new", "sha256": hash_key("ak-new")}]})
    url = f"{house.proxy.admin_url}/admin/backends"
    # Wrong guesses are counted, and this one ends with the first.
    eventually(lambda: httpx.get(url, headers=BOSS).status_code == 401)
    assert httpx.get(url, headers=new).status_code == 200


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("models: {m: {}}\nbackends: [{name: a, url: 'http://x', model: gone}]", "countersign.yaml"),
        ("standing: {alpha: 7}", "standing.alpha"),
        ("nonsense: 1", "nonsense"),
        ("backends: [", "countersign.yaml"),
        (
            f"backends: [{{name: a, url: 'http://', model: m}}]\nmodels: {{m: {{}}}}\nadmin: {{keys: {KEYS}}}",
            "backends.0.url",
        ),
        ("", "countersign.yaml"),
        ("# being written", "countersign.yaml"),
        ("{}", "countersign.yaml"),
        ("models: {m: {}}", "backends"),
        ("x: &A [*A]", "x.0"),
        ("port: 1\nport: 2", "port"),
        ("- 1", "countersign.yaml"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing_and_says_so(
    house: House, text: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = house.proxy.services
    house.write(text)
    eventually(lambda: house.following.said.error)
    assert house.proxy.services is before
    assert house.chat().status_code == 200
    said = house.get("/admin/settings")["this"]
    assert (said["state"], said["error"]["key"]) == ("invalid", key)
    (record,) = (each for each in caplog.records if "cannot be used" in each.message)
    assert (record.levelname, record.__dict__["key"]) == ("ERROR", key)
    assert "countersign_settings_valid 0" in house.http.get("/metrics").text.replace(".0", "")
    assert house.audit(action="settings.reload")[0]["result"].startswith(f"setting {key!r}")
    house.write(house.tree)
    eventually(lambda: house.get("/admin/settings")["this"]["state"] == "current")
    assert "countersign_settings_valid 1" in house.http.get("/metrics").text.replace(".0", "")


def test_a_file_that_takes_away_every_key_is_none_unless_it_is_asked_for(open_house: Callable[..., House]) -> None:
    house = open_house(keys=[{"name": "ann", "sha256": hash_key("sk-ann")}])
    cut: list[dict[str, Any]] = [
        {"keys": []},
        {"admin": house.tree["admin"] | {"keys": []}},
        {"backends": []},
        {"backends": [], "models": {}},
    ]
    for sections in cut:
        house.write(house.tree | sections)
        assert "`countersign reload`, or SIGHUP" in house.refused()["expected"]
        assert house.chat().status_code == 401
        house.write(house.tree)
        eventually(lambda: house.following.said.error is None)
    house.change(keys=[])
    assert house.admin.post("/admin/settings/reload").json()["this"]["error"] is None
    assert house.proxy.services.settings.keys == ()
    # What holds is the file by now: it is read again without anybody asking.
    house.change(standing={"alpha": 0.01})
    eventually(lambda: house.proxy.services.settings.standing.alpha == 0.01)


def test_a_tokenizer_that_is_not_there_changes_nothing_but_what_redis_says(house: House) -> None:
    house.change(models={"m": {"tokenizer": "/nowhere/tokenizer.json"}})
    assert house.refused()["key"] == "models.m.tokenizer"
    assert house.admin.patch("/admin/backends/b1", json={"max_concurrency": 7}).json()["holds"]
    assert house.backend()["settings"]["max_concurrency"] == 7
    assert house.refused()["key"] == "models.m.tokenizer"


def test_a_file_that_is_gone_changes_nothing(house: House) -> None:
    house.path.unlink()
    eventually(lambda: house.get("/admin/settings")["this"]["error"])
    assert house.get("/admin/settings")["this"]["error"]["key"] == "--config"
    assert house.chat().status_code == 200
    house.write(house.tree)
    eventually(lambda: house.get("/admin/settings")["this"]["error"] is None)


def test_what_needs_a_restart_is_named_and_the_rest_holds(house: House) -> None:
    bounds = house.proxy.services.settings.bounds
    house.change(
        port=1, redis_url="redis://elsewhere", bounds={"request_bytes": 1024 * 1024}, relay={"retries": 0}, webhook=None
    )
    eventually(lambda: house.proxy.services.settings.relay.retries == 0)
    eventually(lambda: house.get("/admin/settings")["this"]["restart"])
    said = house.get("/admin/settings")["this"]
    assert (said["restart"], said["state"]) == (["bounds.request_bytes", "port", "redis_url"], "restart needed")
    assert house.proxy.services.settings.bounds == bounds
    house.change(webhook={"url": "https://example.com/hook", "secret": "whsec_AAAA"})
    eventually(lambda: "webhook" in house.get("/admin/settings")["this"]["restart"])
    assert house.proxy.services.settings.webhook is None
    assert "whsec" not in json.dumps(house.audit()) + json.dumps(house.get("/admin/settings"))


def test_a_map_of_kubernetes_is_followed(
    open_house: Callable[..., House], tmp_path: Path, backend: FakeBackend, second: FakeBackend
) -> None:
    house = open_house()
    # As the kubelet does it: the file is a link into `..data`, which is a link that is swapped.
    folder = house.path.parent
    for name, tree in (("..1", tree_of(backend.url)), ("..2", tree_of(backend.url, second.url))):
        (folder / name).mkdir()
        (folder / name / "countersign.yaml").write_text(yaml.safe_dump(tree))
    (folder / "..data").symlink_to("..1")
    house.path.unlink()
    house.path.symlink_to("..data/countersign.yaml")
    eventually(lambda: house.get("/admin/settings")["this"]["error"] is None)
    assert house.names() == ["b1"]
    (folder / "..data_tmp").symlink_to("..2")
    (folder / "..data_tmp").replace(folder / "..data")
    eventually(lambda: house.names() == ["b1", "b2"])


def test_it_is_read_when_somebody_asks(open_house: Callable[..., House]) -> None:
    house = open_house(admin={"port": 0, "keys": KEYS, "watch_seconds": 0})
    house.change(standing={"alpha": 0.01})
    time.sleep(0.5)
    assert house.proxy.services.settings.standing.alpha == 1e-6
    answer = house.admin.post("/admin/settings/reload")
    assert (answer.status_code, answer.json()["this"]["state"]) == (202, "current")
    assert house.proxy.services.settings.standing.alpha == 0.01
    assert house.audit(action="settings.reload")[0]["actor"] == "key:boss"
    house.change(standing={"alpha": 0.02})
    house.following.wake()
    eventually(lambda: house.proxy.services.settings.standing.alpha == 0.02)


def test_a_request_goes_on_as_it_began(house: House, backend: FakeBackend, second: FakeBackend) -> None:
    go = threading.Event()
    backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), Until(go), *wire.stream(wire.FRAMES[1:])[1:]]
    asked = {"model": "m", "messages": [], "stream": True}
    with house.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        lines = answer.iter_lines()
        next(lines)
        house.change(models={"other": {}}, backends=[])
        assert house.admin.post("/admin/settings/reload").status_code == 202
        assert house.names() == []
        assert house.chat().status_code == 404
        go.set()
        assert "data: [DONE]" in list(lines)


def test_a_request_whose_body_comes_slowly_is_routed_by_what_holds_then(house: House, backend: FakeBackend) -> None:
    body = b'{"model": "new", "messages": []}'
    with socket.create_connection(("127.0.0.1", house.proxy.port), timeout=30) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        client.sendall(body[:9])
        house.change(models={"new": {}}, backends=[house.tree["backends"][0] | {"model": "new"}])
        eventually(lambda: "new" in house.proxy.services.settings.models)
        client.sendall(body[9:])
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert len(backend.requests) == 1


def test_streams_do_not_notice(house: House, backend: FakeBackend, second: FakeBackend) -> None:
    """Streams begin, run and end while the file and Redis change under them; each gets all of its answer."""
    backend.script = second.script = wire.stream(pause=0.004)
    over, failures, done = threading.Event(), [], [0]

    def stream() -> None:
        with httpx.Client(base_url=house.proxy.url, timeout=60) as client:
            while not over.is_set():
                answer = client.post("/v1/chat/completions", json={"model": "m", "messages": [], "stream": True})
                if answer.status_code != 200 or not answer.text.endswith("data: [DONE]\n\n"):
                    failures.append((answer.status_code, answer.text[-200:]))
                done[0] += 1

    threads = [threading.Thread(target=stream) for _ in range(12)]
    for each in threads:
        each.start()
    first, other = house.tree["backends"][0], {**house.tree["backends"][0], "name": "b2", "url": second.url}
    for n in range(12):
        house.change(backends=[[first, other], [other], [first]][n % 3], standing={"alpha": 0.001 * (n + 1)})
        eventually(lambda: house.proxy.services.settings.standing.alpha == 0.001 * (n + 1))  # noqa: B023
        name = house.names()[0]
        for fields in ({"max_concurrency": 6}, {"max_concurrency": 0, "precision": f"p{n}"}):
            assert house.admin.patch(f"/admin/backends/{name}", json=fields).status_code == 200
    over.set()
    for each in threads:
        each.join()
    assert failures == []
    assert done[0] > 12
    eventually(lambda: all(backend.outstanding == 0 for backend in house.proxy.services.backends.all))


@pytest.mark.parametrize(
    ("where", "name"),
    [(SettingsFile, "_read"), (following, "reread"), (following, "check_addresses"), (following, "load_tokenizers")],
)
def test_the_loop_never_waits_for_it(house: House, monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    """However long a file is read or checked, everything else on the event loop goes on."""
    begun, over = threading.Event(), threading.Event()
    quick = getattr(where, name)

    def slow(*given: Any, **named: Any) -> Any:
        begun.set()
        assert over.wait(2 * PATIENCE)
        return quick(*given, **named)

    monkeypatch.setattr(where, name, slow)
    before = house.proxy.services
    house.change(standing={"alpha": 0.003})
    try:
        assert begun.wait(PATIENCE)
        assert house.chat().status_code == 200
        assert house.proxy.services is before
    finally:
        over.set()
    eventually(lambda: house.proxy.services.settings.standing.alpha == 0.003)


def test_each_process_says_what_it_goes_by(open_house: Callable[..., House]) -> None:
    one, other = open_house(), open_house()
    eventually(lambda: len(one.redis.hgetall(RUNNING)) == 2)
    said = one.get("/admin/settings")
    assert said["this"]["id"] != said["others"][0]["id"]
    other.write("nonsense: 1")
    eventually(lambda: one.get("/admin/settings")["others"][0]["state"] == "invalid")
    assert one.get("/admin/settings")["this"]["state"] == "current"
