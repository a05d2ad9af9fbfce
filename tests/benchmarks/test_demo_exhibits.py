"""What the demo leaves behind: an answer's evidence of each backend, and how anybody checks it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.demo.exhibits import ExhibitError, save
from benchmarks.demo.report import Row
from benchmarks.demo.traffic import Outcome, Shot
from policies import jws
from tests.policies.test_examination import audited
from tests.support.bundles import KEY
from tests.support.toy_http import Handler, served
from verifier_pool import verify

ROWS = [Row(name, "", [Outcome(Shot("?", 0.0, False), {"id": name})]) for name in ("honest", "impostor")]
GIVEN = {
    "/.well-known/countersign-keys.json": json.dumps(jws.jwk_set([jws.public_bytes(KEY)])).encode(),
    "/v1/verifications/honest/evidence": audited().bytes,
    "/v1/verifications/honest/report": b"<html>honest",
    "/v1/verifications/impostor/evidence": audited("fp8").bytes,
    "/v1/verifications/impostor/report": b"<html>impostor",
}


class Proxy(Handler):
    """Gives what there is."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200 if self.path in GIVEN else 404)
        self.send_header("content-length", str(len(GIVEN.get(self.path, b""))))
        self.end_headers()
        self.wfile.write(GIVEN.get(self.path, b""))


def test_each_file_can_be_checked_by_the_command_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(Proxy) as url:
        commands = save(url, tmp_path / "new" / "folder", ROWS)
    assert [verify.main(shlex.split(command)[2:]) for command in commands] == [0, 0]
    said = capsys.readouterr().out
    assert "Passed" in said
    assert "Rejected" in said
    assert (tmp_path / "new" / "folder" / "impostor.html").read_bytes() == b"<html>impostor"


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with served(Proxy) as url, pytest.raises(ExhibitError, match="404"):
        save(
            url,
            tmp_path,
            [Row("gone", "", ROWS[0].outcomes), Row("x", "", [Outcome(Shot("?", 0, False), {"id": "y"})])],
        )
