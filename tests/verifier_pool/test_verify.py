from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from countersign.pins import Pins
from policies import codec, head, jws, merkle
from policies.errors import SettingsError
from policies.examination import Outcome
from policies.head import verify_head
from policies.judging import Declared, Grounds
from policies.receipt import leaf_of
from tests.support.bundles import KEY, LOG, OTHER_KEY, Made, made
from tests.verifier_pool.toy import VOCAB, ToyReference, answer
from verifier_pool import verify, verify_evidence
from verifier_pool.replays import request_of


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COUNTERSIGN_CONFIG", raising=False)


def write(path: Path) -> str:
    path.write_bytes(codec.pack([answer()]))
    return str(path)


def test_honest_evidence_without_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([write(tmp_path / "a.cs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "unaudited" in lines[0]
    assert lines[1].split()[:2] == ["structure", "pass"]


def test_json_has_no_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([write(tmp_path / "a.cs"), write(tmp_path / "b.cs"), "--json"]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["object"] for document in documents] == ["verification"] * 2
    assert all("owner" not in document for document in documents)


def test_numbers_that_are_none_are_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.bin").write_bytes(codec.pack([answer(created=float("nan"))]))
    verify.main([str(tmp_path / "a.bin"), "--json"])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["created"] is None


def test_there_is_no_page_of_what_nobody_signed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([write(tmp_path / "a.bin"), "--html", str(tmp_path / "a.html")]) == 4
    assert "no page" in capsys.readouterr().err


def test_edited_evidence_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    honest = answer()
    edited = honest.claim_logprobs.copy()
    edited[3, 0] = -9.0
    (tmp_path / "a.cs").write_bytes(codec.pack([replace(honest, claim_logprobs=edited)]))
    assert verify.main([str(tmp_path / "a.cs")]) == 1
    assert "reject" in capsys.readouterr().out


def test_unreadable_files_do_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.cs").write_bytes(b"junk")
    (tmp_path / "cut.cs").write_bytes(codec.pack([answer()])[:-9])
    files = [str(tmp_path / name) for name in ("bad.cs", "cut.cs", "none.cs")]
    assert verify.main([*files, write(tmp_path / "a.cs")]) == Outcome.UNREADABLE
    printed = capsys.readouterr()
    assert "unaudited" in printed.out
    assert "bad.cs" in printed.err
    assert "none.cs" in printed.err


def test_with_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "countersign.yaml").write_text("models: {toy: {}}")
    reference = ToyReference()
    monkeypatch.setattr(verify_evidence, "open_references", lambda _settings: {"toy": reference})
    assert verify.main([write(tmp_path / "a.cs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["audited"] is True
    assert reference.closed
    assert np.array_equal(reference.seen[0].prompt_ids, [3, 5, 7])


def bundled(**changes: object) -> Made:
    evidence = answer(**changes)  # type: ignore[arg-type]
    replays = ToyReference().replay([request_of(evidence)])
    return made([evidence], Grounds(Declared(VOCAB), replays=replays, earlier=[None]))


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys.json").write_text(json.dumps(jws.jwk_set([jws.public_bytes(KEY)])))
    return str(tmp_path / "keys.json")


def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: bytes, *options: str) -> tuple[int, str]:
    (tmp_path / "a.countersign").write_bytes(data)
    code = verify.main([str(tmp_path / "a.countersign"), *options])
    return code, capsys.readouterr().out


def test_a_bundle_is_verified_whatever_its_verdict(
    tmp_path: Path, keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(capsys, tmp_path, bundled().bytes, "--keys", keys)
    assert code == 0
    assert "Judged again, the evidence gives the same verdict" in out
    honest = answer()
    edited = honest.claim_logprobs.copy()
    edited[3, 0] = -9.0
    lied = made([replace(honest, claim_logprobs=edited)], Grounds(Declared(VOCAB)))
    code, out = run(capsys, tmp_path, lied.bytes, "--keys", keys)
    assert (code, lied.statement["verification"]["verdict"]) == (0, "reject")
    assert "Rejected:" in out


@pytest.mark.parametrize("form", ["text", "json"])
def test_each_fault_has_its_exit_code(tmp_path: Path, keys: str, capsys: pytest.CaptureFixture[str], form: str) -> None:
    good, pin = bundled(), jws.kid_of(jws.public_bytes(KEY))
    options = ["--json"] if form == "json" else []
    changed = bytearray(good.bytes)
    changed[good.bytes.index(good.bundle.evidence) + 40] ^= 1
    cases: list[tuple[bytes, list[str], int]] = [
        (good.bytes, ["--keys", keys], 0),
        (good.bytes, ["--keys", pin], 0),
        (good.bytes, ["--any-key"], 0),
        (good.bytes, [], 6),
        (replace(good, key=OTHER_KEY).bytes, ["--keys", keys], 6),
        (good.bytes[:-40], ["--keys", keys], 4),
        (good.bytes.replace(good.bundle.receipt[-9:].encode(), b"A" * 9), ["--keys", keys], 5),
        (bytes(changed), ["--keys", keys], 7),
        (good.saying(verdict="pass").bytes, ["--keys", keys], 8),
        (good.bytes[:-1] + bytes([good.bytes[-1] ^ 1]), ["--keys", keys], 10),
    ]
    for data, more, expected in cases:
        code, out = run(capsys, tmp_path, data, *more, *options)
        assert (code, expected) == (expected, code), out
        if form == "json":
            said = json.loads(out)
            assert said["exit_code"] == expected
            assert [each["fault"] for each in said["findings"] if not each["holds"]] or not expected


def test_wrong_keys_and_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.countersign").write_bytes(bundled().bytes)
    (tmp_path / "no-keys.json").write_text('{"keys": []}')
    for wrong in ("https://example.com/keys", "no-keys.json", "a.countersign"):
        with pytest.raises(SettingsError, match="--keys"):
            verify.main([str(tmp_path / "a.countersign"), "--keys", wrong])
    with pytest.raises(SystemExit):
        verify.main(["a", "b", "--html", "c"])
    assert "take one bundle" in capsys.readouterr().err


def test_what_a_client_has_of_its_own_is_held_against_it(
    tmp_path: Path, keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body = b'{"model":"toy","messages":[],"max_tokens":12}'
    served = b'{"choices":[{"index":0,"message":{"content":""},"finish_reason":"length"}]}'
    good = bundled(shown_sha256=hashlib.sha256(served).hexdigest())
    hashes = {**good.statement["sha256"], "request": hashlib.sha256(body).hexdigest()}
    data = replace(good, statement={**good.statement, "sha256": hashes}).bytes
    mine, theirs = tmp_path / "request.json", tmp_path / "answer.json"
    for sent, got, expected in ((body, served, 0), (body + b" ", served, 7), (body, served + b" ", 7)):
        mine.write_bytes(sent)
        theirs.write_bytes(got)
        code, out = run(capsys, tmp_path, data, "--keys", keys, "--request", str(mine), "--answer", str(theirs))
        assert code == expected, out


def test_a_bundle_is_held_against_what_was_pinned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = bundled()
    public = {jws.kid_of(jws.public_bytes(KEY)): jws.public_bytes(KEY)}
    path, consistency = tmp_path / "pins.json", tmp_path / "consistency.json"
    pinned, leaf = Pins(path), leaf_of(made.bundle.receipt).hex()
    assert made.bundle.log is not None
    shown = verify_head(made.bundle.log.head, public)
    for leaves, expected in (({made.choices[0].id: leaf}, 0), ({made.choices[0].id: "0" * 64}, 11)):
        pinned.pin(shown, public, leaves)
        code, out = run(capsys, tmp_path, made.bytes, "--pins", str(path), "--json")
        said = json.loads(out)
        assert (code, said["exit_code"]) == (expected, expected), out
        assert said["outcome"] == ("contradicts_pins" if expected else "verified")
        assert {each["about"] for each in said["findings"]} >= {"pinned receipt", "pinned head"}
    few = [merkle.leaf(b"another")]
    pinned.pin(verify_head(jws.sign(head.encode(LOG, 1, merkle.root(few), 1.0), KEY, head.KIND), public), public, {})
    assert run(capsys, tmp_path, made.bytes, "--pins", str(path))[0] == 0
    consistency.write_text(json.dumps({"proof": ["00" * 32]}))
    code, out = run(capsys, tmp_path, made.bytes, "--pins", str(path), "--consistency", str(consistency))
    assert code == 11
    assert "contradicts what you pinned" in out
    for wrong in ("--pins", "--consistency"):
        with pytest.raises(SettingsError, match=wrong):
            run(capsys, tmp_path, made.bytes, "--pins", str(path), wrong, str(tmp_path / "a.countersign"))


HOSTILE = "\x1b[31m\x1b]0;title\x07\u202egnp.exe\u2066<script>alert(1)</script>\r\x00\x9b2J"


def test_nothing_that_a_backend_says_reaches_a_terminal_raw(
    tmp_path: Path, keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = replace(answer(), backend=HOSTILE, model=HOSTILE, text=HOSTILE, finish_reason=HOSTILE)
    data = made([evidence], Grounds(Declared(VOCAB))).bytes
    for options in (["--json"], []):
        code, out = run(capsys, tmp_path, data, "--keys", keys, *options)
        assert code == 0
        assert out.replace("\n", "").isprintable()
        assert "alert(1)" in out
    (tmp_path / "a.cs").write_bytes(codec.pack([evidence]))
    verify.main([str(tmp_path / "a.cs")])
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_a_bundle_needs_no_engine_and_no_network(tmp_path: Path, keys: str) -> None:
    (tmp_path / "a.countersign").write_bytes(bundled().bytes)
    text = (
        "import socket, sys\n"
        "def no(*_, **__): raise AssertionError('network')\n"
        "socket.socket = socket.create_connection = socket.getaddrinfo = no\n"
        "from verifier_pool.verify import main\n"
        "code = main(sys.argv[1:])\n"
        "bad = {'torch', 'vllm', 'redis', 'rq', 'httpx', 'aiohttp', 'tokenizers', 'starlette'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "raise SystemExit(code)\n"
    )
    command = [sys.executable, "-c", text, str(tmp_path / "a.countersign"), "--keys", keys]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_is_written(tmp_path: Path, keys: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(capsys, tmp_path, bundled().bytes, "--keys", keys, "--html", str(tmp_path / "a.html"))
    assert code == 0
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
