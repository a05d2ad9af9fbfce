from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisDown

from policies.errors import SettingsError, StoreUnavailable
from tests.support.waiting import PATIENCE, ends, wait_until
from tests.verifier_pool import rig
from tests.verifier_pool.toy import ToyReference, settings
from verifier_pool import context, runtime, worker
from verifier_pool.runtime import Child, read_settings, supervise, through_outages


def test_settings_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COUNTERSIGN_CONFIG", raising=False)
    with pytest.raises(SettingsError, match="--config"):
        read_settings(None)
    (tmp_path / "countersign.yaml").write_text("port: 1234")
    assert read_settings(None).port == 1234
    (tmp_path / "other.yaml").write_text("port: 4321")
    monkeypatch.setenv("COUNTERSIGN_CONFIG", "other.yaml")
    assert read_settings(None).port == 4321


def test_settings_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "countersign.yaml").write_bytes(b"port: \x95")
    with pytest.raises(SettingsError, match="--config"):
        read_settings(str(tmp_path / "countersign.yaml"))


@pytest.mark.parametrize("url", ["nonsense", "http://:hidden@x", "redis://:hidden@x:port/0"])
def test_a_wrong_redis_url_stops_the_start_and_is_not_repeated(tmp_path: Path, url: str) -> None:
    path = tmp_path / "countersign.yaml"
    path.write_text(f"redis_url: {url!r}")
    with pytest.raises(SettingsError, match="redis_url") as caught:
        worker.main(["--config", str(path), "--burst"])
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"key": {}, "arms": []}'])
def test_a_broken_profile_stops_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    rules = settings("redis://x", models={"toy": {"profile": str(path)}})
    with pytest.raises(SettingsError, match=r"models\.toy\.profile"):
        context.read_profiles(rules)


def test_a_missing_profile_stops_the_start() -> None:
    rules = settings("redis://x", models={"toy": {"profile": "/nowhere.json"}})
    with pytest.raises(SettingsError, match=r"models\.toy\.profile"):
        worker.run(rules, threading.Event())


def test_one_bad_reference_closes_those_that_started(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Opened:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    def open_reference(name: str, _settings: object) -> Opened:
        if name == "b":
            raise SettingsError("models.b.reference", "another")
        return Opened(name)

    monkeypatch.setattr(context, "open_reference", open_reference)
    reference = {"reference": {"kind": "vllm_http", "url": "http://x"}}
    rules = settings("redis://x", models={"a": reference, "b": reference}, backends=[])
    with pytest.raises(SettingsError, match=r"models\.b"):
        context.open_references(rules)
    assert closed == ["a"]


def test_a_bad_second_reference_closes_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reference = ToyReference()

    def open_references(
        _settings: object, *, second: bool = False, model: str | None = None
    ) -> dict[str, ToyReference]:
        if second:
            raise SettingsError("models.toy.second_reference", "another")
        return {"toy": reference}

    monkeypatch.setattr(context, "open_references", open_references)
    with pytest.raises(SettingsError, match="second_reference"):
        worker.run(settings(f"unix://{tmp_path}/none.sock"), threading.Event())
    assert reference.closed


def test_the_second_reference_and_profile_are_read_from_their_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(context, "open_reference", lambda _name, given: opened.append(given.url))
    first, other = {"kind": "vllm_http", "url": "http://first"}, {"kind": "vllm_http", "url": "http://second"}
    toy = {"reference": first, "second_reference": other, "second_profile": "/nowhere.json"}
    rules = settings("redis://x", models={"toy": toy})
    assert list(context.open_references(rules)) == list(context.open_references(rules, second=True)) == ["toy"]
    assert opened == ["http://first", "http://second"]
    assert context.read_profiles(rules) == {}
    with pytest.raises(SettingsError, match=r"models\.toy\.second_profile"):
        context.read_profiles(rules, second=True)


def test_burst_does_not_wait_for_redis(tmp_path: Path) -> None:
    rules = settings(f"unix://{tmp_path}/none.sock")
    with pytest.raises(StoreUnavailable):
        worker.run(rules, threading.Event(), burst=True)


def test_outages_are_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "BACKOFF_SECONDS", (0.01, 0.02))
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) < 6:
            raise RedisDown("down")

    through_outages(work, threading.Event())
    assert len(calls) == 6


def test_stopping_during_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    def work() -> None:
        threading.Timer(0.1, stop.set).start()
        raise RedisDown("down")

    monkeypatch.setattr(runtime, "BACKOFF_SECONDS", (3600.0,))
    ends(lambda: through_outages(work, stop))


def test_a_child_is_started_again_and_ends_with_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "pids"
    code = f"import os, time; open({str(marks)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    child = Child([sys.executable, "-c", code])

    def pids() -> list[int]:
        return [int(line) for line in marks.read_text().split()] if marks.exists() else []

    def started_again() -> bool:
        child.keep()
        return len(pids()) == 2

    try:
        child.keep()
        rig.wait_until(pids)
        os.kill(pids()[0], signal.SIGKILL)
        child.keep()
        assert len(pids()) == 1
        clock = time.monotonic
        monkeypatch.setattr("verifier_pool.runtime.time.monotonic", lambda: clock() + 10)
        rig.wait_until(started_again)
    finally:
        child.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pids()[1], 0)


@pytest.mark.parametrize(("code", "burst", "expected"), [(3, False, 3), (3, True, 3), (0, True, 0), (1, True, 1)])
def test_a_supervisor_ends_as_its_processes_do(code: int, burst: bool, expected: int) -> None:
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    assert supervise(command, 2, threading.Event(), patience=5, burst=burst) == expected


def test_one_that_is_started_again_may_find_its_file_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one dies, and when started again refuses its settings until the file is whole; the second works on."""
    monkeypatch.setattr("verifier_pool.runtime._AGAIN_SECONDS", 0.0)
    code = (
        "import os, pathlib, sys, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "for number in range(1000):\n"
        "    try:\n"
        "        (here / f'start{number}').touch(exist_ok=False)\n"
        "        break\n"
        "    except FileExistsError:\n"
        "        pass\n"
        "if number == 0:\n"
        "    while not (here / 'start1').exists(): time.sleep(0.01)\n"
        "    sys.exit(1)\n"
        "if number > 1 and not (here / 'whole').exists():\n"
        "    sys.exit(3)\n"
        "if number > 1:\n"
        "    (here / 'back').touch()\n"
        "time.sleep(600)\n"
    )
    stop = threading.Event()

    def repair() -> None:
        try:
            rig.wait_until((tmp_path / "start4").exists)
            (tmp_path / "whole").touch()
            rig.wait_until((tmp_path / "back").exists)
        finally:
            stop.set()

    thread = threading.Thread(target=repair)
    thread.start()
    assert supervise([sys.executable, "-c", code], 2, stop, patience=PATIENCE) == 0
    thread.join()
    assert (tmp_path / "back").exists()


def test_a_supervisor_asks_all_at_once(tmp_path: Path) -> None:
    """Each of them ends only once all have been asked to."""
    code = (
        "import os, pathlib, signal, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def end(*_):\n"
        "    (folder / f'asked{os.getpid()}').touch()\n"
        "    while len(list(folder.glob('asked*'))) < 4: time.sleep(0.01)\n"
        "    sys.exit(0)\n"
        "signal.signal(15, end)\n"
        "(folder / f'up{os.getpid()}').touch()\n"
        "time.sleep(600)\n"
    )
    stop = threading.Event()

    def ask() -> None:
        rig.wait_until(lambda: len(list(tmp_path.glob("up*"))) == 4)
        stop.set()

    threading.Thread(target=ask).start()
    assert supervise([sys.executable, "-c", code], 4, stop, patience=PATIENCE) == 0


def test_a_hangup_of_one_that_still_starts_waits_and_reaches_its_children(tmp_path: Path) -> None:
    """Whoever is started while SIGHUP is held starts so, too, and hears of it once it listens."""
    child = tmp_path / "child.py"
    child.write_text(
        "import pathlib, signal, sys, time\n"
        "from verifier_pool.link.settings_file import hear_hangups\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "(here / 'started').touch()\n"
        "while not (here / 'sent').exists(): time.sleep(0.01)\n"
        "heard = []\n"
        "signal.signal(signal.SIGHUP, lambda *_: heard.append(1))\n"
        "hear_hangups()\n"
        "(here / 'heard').write_text(str(len(heard)))\n"
    )
    one = Child([sys.executable, "-c", f"import sys; exec(open({str(child)!r}).read())", str(tmp_path)])
    one.keep()
    wait_until((tmp_path / "started").exists)
    one.hang_up()
    (tmp_path / "sent").touch()
    wait_until(lambda: one.code is not None)
    assert (one.code, (tmp_path / "heard").read_text()) == (0, "1")
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
