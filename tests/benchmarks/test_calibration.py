"""`countersign calibrate` against a backend on a socket and a reference made of the toy model."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.calibration import asking, command, replaying
from benchmarks.calibration.errors import CalibrationError
from policies.errors import ProfileError, SettingsError
from policies.profile import Profile
from tests.benchmarks.calibrated import ENGINE, RUNTIME, ToyServer, configuration, failing, hanging_up
from tests.support.fake_backend import FakeBackend
from tests.support.wire import whole
from tests.verifier_pool.toy import ToyReference
from tests.verifier_pool.toy import failing as trouble
from verifier_pool.profiles import new_key, open_profile

SMALL = ["--requests", "32", "--temperatures", "0,0.8", "--lengths", "32,40", "--concurrency", "1,4", "--words", "30"]


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyReference]:
    toy = ToyReference()
    monkeypatch.setattr(command, "open_reference", lambda name, settings: toy)
    monkeypatch.setattr(asking, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(replaying, "PAUSE_SECONDS", 0.001)
    yield toy
    assert toy.closed or not toy.seen


def calibrate(folder: Path, *urls: str, extra: tuple[str, ...] = (), **changes: Any) -> Profile:
    config = configuration(folder, *urls, **changes)
    names = [part for number in range(1, len(urls) + 1) for part in ("--backend", f"b{number}")]
    output = folder / "profile.json"
    assert command.main(["--config", str(config), *names, *SMALL, *extra, "--output", str(output)]) == 0
    return open_profile(output.read_bytes()).profile


def test_a_trusted_backend_becomes_a_profile(
    tmp_path: Path, reference: ToyReference, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ToyServer()
    with FakeBackend(server) as backend:
        profile = calibrate(tmp_path, backend.url, extra=("--hardware", "two toys"))
    assert (profile.key.model, profile.key.runtime, profile.key.engine) == ("toy", RUNTIME, ENGINE)
    assert profile.key.reference == "toy 1"
    assert {cell.label for cell in profile.cells} == {"b1, batch 1", "b1, batch 4"}
    assert {cell.check for cell in profile.cells} == {"distance", "margin"}
    assert {cell.temperature for cell in profile.cells} == {0, 2}
    assert {cell.n for cell in profile.cells if cell.check == "distance" and cell.length == 16} == {8}
    assert profile.made["versions"] == "b1 0.32.0"
    assert profile.made["hardware"] == "two toys"
    assert profile.made["failures"] == "none"
    assert "--requests 32" in profile.made["arguments"]
    assert {fields["stream"] for fields in server.asked} == {True, False}
    assert len({json.dumps(fields["messages"]) for fields in server.asked}) == 32
    assert set(reference.batches) == {1, 4}
    out = capsys.readouterr().out
    assert "32 of 32 answers" in out
    assert " left" in out
    for words in ("0.111", "mu0", "kind of prompt", "under 30 answers", "rejects"):
        assert words in out


def test_several_backends_are_conditions_of_one_profile(tmp_path: Path, reference: ToyReference) -> None:
    with FakeBackend(ToyServer()) as first, FakeBackend(ToyServer(kernels=2)) as second:
        profile = calibrate(tmp_path, first.url, second.url)
    assert {cell.label.split(",")[0] for cell in profile.cells} == {"b1", "b2"}
    assert profile.made["versions"] == "b1 0.32.0, b2 0.32.0"


@pytest.mark.parametrize("extra", [("--top-p", "0.9"), ("--top-k", "5"), ("--kinds", "json,long", "--kinds-apart")])
def test_more_conditions(tmp_path: Path, reference: ToyReference, extra: tuple[str, ...]) -> None:
    more = ("--requests", "64", "--concurrency", "1")
    with FakeBackend(ToyServer()) as backend:
        if extra[0].startswith("--top"):
            # The toy does not cut, so asking it to is asking for a lie, which selection sees.
            with pytest.raises(CalibrationError, match="b1 does not pass selection"):
                calibrate(tmp_path, backend.url, extra=(*more, *extra))
            return
        profile = calibrate(tmp_path, backend.url, extra=(*more, *extra))
    assert {cell.label for cell in profile.cells} == {"b1, batch 1, json", "b1, batch 1, long"}


def test_failures_are_tried_again_and_counted(
    tmp_path: Path, reference: ToyReference, capsys: pytest.CaptureFixture[str]
) -> None:
    reference.trouble = trouble("timeout", 2)
    for change, words in ((failing(3), "3 × status 500"), (hanging_up(2), "2 × ")):
        with FakeBackend(ToyServer(change=change)) as backend:
            profile = calibrate(tmp_path, backend.url)
        assert profile.responses == 32
        assert words in profile.made["failures"]
        assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (ToyServer(change=failing(10**9)), "fails too often.*status 500"),
        (ToyServer(change=failing(1, 401)), "status 401: check its url, key and model"),
        (ToyServer(change=lambda fields, before: [whole(b"{}")]), "does not pass structure|fails too often"),
    ],
)
def test_a_backend_that_gives_no_answers_gives_no_profile(
    tmp_path: Path, reference: ToyReference, server: ToyServer, words: str
) -> None:
    with FakeBackend(server) as backend, pytest.raises(CalibrationError, match=words):
        calibrate(tmp_path, backend.url)
    assert not (tmp_path / "profile.json").exists()


def test_a_backend_that_cannot_be_reached(tmp_path: Path, reference: ToyReference) -> None:
    with pytest.raises(CalibrationError, match=r"b1 fails too often.*ClientConnectorError"):
        calibrate(tmp_path, "http://127.0.0.1:1")


def test_a_cheat_marked_trusted_is_no_measure(tmp_path: Path, reference: ToyReference) -> None:
    def hotter(fields: dict[str, Any], before: int) -> Any:
        return server.reply({**fields, "temperature": fields["temperature"] + 1.0})

    server = ToyServer(change=hotter)
    with FakeBackend(server) as backend, pytest.raises(CalibrationError, match="b1 does not pass selection"):
        calibrate(tmp_path, backend.url)


def test_a_prompt_that_the_reference_renders_otherwise_is_no_measure(
    tmp_path: Path, reference: ToyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = reference.replay

    def rendering(requests: Any) -> Any:
        return [replace(found, prompt_ids=np.asarray([1, 2, 3], np.int32)) for found in honest(requests)]

    monkeypatch.setattr(reference, "replay", rendering)
    with FakeBackend(ToyServer()) as backend, pytest.raises(CalibrationError, match="b1 does not pass structure"):
        calibrate(tmp_path, backend.url)


@pytest.mark.parametrize("reason", ["refused", "unreachable"])
def test_a_reference_that_cannot_replay(tmp_path: Path, reference: ToyReference, reason: str) -> None:
    reference.trouble = trouble(reason)
    with FakeBackend(ToyServer()) as backend, pytest.raises(CalibrationError, match=reason):
        calibrate(tmp_path, backend.url)


def test_a_run_broken_off_continues_where_it_stopped(
    tmp_path: Path, reference: ToyReference, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = ("--keep", str(tmp_path / "kept"))
    broken = ToyServer(change=lambda fields, before: [whole(b"{}", 403)] if before == 20 else None)
    with FakeBackend(broken) as backend, pytest.raises(CalibrationError):
        calibrate(tmp_path, backend.url, extra=keep)
    kept = len(list((tmp_path / "kept" / "answers").iterdir()))
    assert 17 <= kept <= 21
    whole_run = ToyServer()
    with FakeBackend(whole_run) as backend:
        profile = calibrate(tmp_path, backend.url, extra=keep)
    assert len(whole_run.asked) == 32 - kept
    assert f"{kept} of 32 answers were kept by an earlier run" in capsys.readouterr().out
    assert profile.responses == 32

    again = tmp_path / "again.json"
    assert command.main(["--from", str(tmp_path / "kept"), "--output", str(again)]) == 0
    refitted = open_profile(again.read_bytes()).profile
    assert refitted.cells == profile.cells
    assert refitted.key == profile.key

    (tmp_path / "kept" / "replays" / "00003.npz").unlink()
    assert command.main(["--from", str(tmp_path / "kept"), "--output", str(again)]) == 0
    assert "1 of 32 answers or their replays are not in" in capsys.readouterr().out


def test_a_kept_run_continues_only_as_it_was_begun(tmp_path: Path, reference: ToyReference) -> None:
    keep = ("--keep", str(tmp_path / "kept"))
    with FakeBackend(ToyServer()) as backend:
        calibrate(tmp_path, backend.url, extra=keep)
        with pytest.raises(CalibrationError, match=r"begun otherwise \(plan differ"):
            calibrate(tmp_path, backend.url, extra=(*keep, "--lengths", "48"))
        with pytest.raises(CalibrationError, match=r"begun otherwise \(declared differ"):
            calibrate(tmp_path, backend.url, extra=keep, engine="vLLM 0.32.0, other")
        with pytest.raises(CalibrationError, match="holds other things"):
            calibrate(tmp_path, backend.url, extra=("--keep", str(tmp_path)))
        reference.name = "toy 2"
        (tmp_path / "kept" / "replays" / "00000.npz").unlink()
        with pytest.raises(CalibrationError, match="one reference"):
            calibrate(tmp_path, backend.url, extra=keep)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("manifest.json", b"{}", "another version"),
        ("manifest.json", b"[", "no kept calibration"),
        ("manifest.json", b'{"format": 1}', "lacks"),
        ("answers/00000", b"\x00", "cannot be read"),
        ("replays/00000.npz", b"\x00", "cannot be read"),
    ],
)
def test_a_kept_run_that_was_damaged(
    tmp_path: Path, reference: ToyReference, name: str, content: bytes, words: str
) -> None:
    kept = tmp_path / "kept"
    with FakeBackend(ToyServer()) as backend:
        calibrate(tmp_path, backend.url, extra=("--keep", str(kept)))
    (kept / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=words):
        command.main(["--from", str(kept), "--output", str(tmp_path / "again.json")])
    with pytest.raises(CalibrationError, match="no kept calibration"):
        command.main(["--from", str(tmp_path / "nothing"), "--output", str(tmp_path / "again.json")])


def test_a_profile_is_signed_where_asked(tmp_path: Path, reference: ToyReference) -> None:
    key = tmp_path / "key.pem"
    public = new_key(key)
    with FakeBackend(ToyServer()) as backend:
        calibrate(tmp_path, backend.url, extra=("--sign", str(key)))
        assert open_profile((tmp_path / "profile.json").read_bytes()).signer == public
        assert stat.S_IMODE((tmp_path / "profile.json").stat().st_mode) & 0o600 == 0o600
        key.write_text("no key")
        with pytest.raises(SettingsError, match="--sign"):
            calibrate(tmp_path, backend.url, extra=("--sign", str(key)))
        with pytest.raises(SettingsError, match="--sign"):
            calibrate(tmp_path, backend.url, extra=("--sign", str(tmp_path / "missing")))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"trusted": False}, "backends.b2.trusted"),
        ({"runtime": "vllm-0.32-v1-cpu"}, "backends.b2.runtime"),
        ({"precision": "fp8"}, "backends.b2.precision"),
        ({"engine": "vLLM 0.32.1"}, "backends.b2.engine"),
        ({"speculative": True}, "backends.b2.speculative"),
    ],
)
def test_backends_of_one_profile_are_trusted_and_declared_alike(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        calibrate(tmp_path, "http://127.0.0.1:1", "http://127.0.0.1:1", **changes)
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("version", "changes", "key"),
    [
        ("0.33.0", {}, "backends.b1.engine"),
        ("0.32.1", {}, "backends.b1.engine"),
        ("0.33.0", {"engine": "a toy"}, "backends.b1.runtime"),
    ],
)
def test_a_backend_that_runs_another_version_than_declared(
    tmp_path: Path, reference: ToyReference, version: str, changes: dict[str, Any], key: str
) -> None:
    server = ToyServer(version=version)
    with FakeBackend(server) as backend, pytest.raises(SettingsError) as refused:
        calibrate(tmp_path, backend.url, **changes)
    assert refused.value.key == key
    assert not server.asked


@pytest.mark.parametrize(
    ("version", "changes", "words"),
    [
        (None, {}, "does not tell its version"),
        ("0.32.0", {"engine": "a toy"}, "names no version"),
        ("0.32.0+cpu", {}, ""),
        ("0.32.1", {"engine": "vLLM 0.32"}, ""),
    ],
)
def test_versions_that_cannot_be_compared_are_noted(
    tmp_path: Path,
    reference: ToyReference,
    capsys: pytest.CaptureFixture[str],
    version: str | None,
    changes: dict[str, Any],
    words: str,
) -> None:
    with FakeBackend(ToyServer(version=version)) as backend:
        calibrate(tmp_path, backend.url, **changes)
    out = capsys.readouterr().out
    assert ("note: " in out) is bool(words)
    assert words in out


def test_without_drift_long_enough_there_is_no_profile(tmp_path: Path, reference: ToyReference) -> None:
    with FakeBackend(ToyServer()) as backend, pytest.raises(ProfileError, match="16 tokens"):
        calibrate(tmp_path, backend.url, extra=("--lengths", "8"))


@pytest.mark.parametrize("name", ["nobody", ""])
def test_an_unknown_backend_is_named(tmp_path: Path, name: str) -> None:
    config = configuration(tmp_path, "http://127.0.0.1:1")
    with pytest.raises(SettingsError, match="b1"):
        command.main(["--config", str(config), "--backend", name, "--output", str(tmp_path / "p")])


def test_a_model_without_a_reference_cannot_be_calibrated(tmp_path: Path) -> None:
    config = configuration(tmp_path, "http://127.0.0.1:1")
    config.write_text(config.read_text().replace("reference:", "generation_config:"))
    with pytest.raises(SettingsError, match=r"models\.toy\.reference"):
        command.main(["--config", str(config), "--backend", "b1", "--output", str(tmp_path / "p")])


def test_too_few_requests_for_the_arms(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"at least 32.*4 arms"):
        calibrate(tmp_path, "http://127.0.0.1:1", extra=("--requests", "31"))
    with pytest.raises(SettingsError, match="--words"):
        calibrate(tmp_path, "http://127.0.0.1:1", extra=("--words", "5000"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--requests", "many"],
        ["--lengths", "0"],
        ["--lengths", "16,16"],
        ["--temperatures", "-1"],
        ["--temperatures", "nan"],
        ["--top-p", "1"],
        ["--kinds", "haiku"],
        ["--forms", "half"],
        ["--from", "somewhere"],
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(["--backend", "b", "--output", "p", *arguments])
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err
