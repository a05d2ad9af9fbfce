from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from policies import codec
from tests.verifier_pool.toy import ToyReference, answer
from verifier_pool import verify


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


def test_edited_evidence_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    honest = answer()
    edited = honest.claim_logprobs.copy()
    edited[3, 0] = -9.0
    (tmp_path / "a.cs").write_bytes(codec.pack([replace(honest, claim_logprobs=edited)]))
    assert verify.main([str(tmp_path / "a.cs")]) == 1
    assert "reject" in capsys.readouterr().out


def test_unreadable_files_do_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.cs").write_bytes(b"junk")
    assert verify.main([str(tmp_path / "bad.cs"), str(tmp_path / "none.cs"), write(tmp_path / "a.cs")]) == 1
    printed = capsys.readouterr()
    assert "unaudited" in printed.out
    assert "bad.cs" in printed.err
    assert "none.cs" in printed.err


def test_with_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "countersign.yaml").write_text("models: {toy: {}}")
    reference = ToyReference()
    monkeypatch.setattr(verify, "open_references", lambda _settings: {"toy": reference})
    assert verify.main([write(tmp_path / "a.cs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["audited"] is True
    assert reference.closed
    assert np.array_equal(reference.seen[0].prompt_ids, [3, 5, 7])
