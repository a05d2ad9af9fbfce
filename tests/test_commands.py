"""Sub-commands whose names are easily mistaken for one another."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import countersign


@pytest.mark.parametrize(
    ("asked", "module", "given"),
    [
        (["queues", "list"], "queue_command", ["list"]),
        (["profile", "list", "--json"], "profiles_command", ["list", "--json"]),
        (["profile", "reload"], "profiles_command", ["reload"]),
        (["profile", "show", "FILE"], "profile_command", ["show", "FILE"]),
        (["profile"], "profile_command", []),
        (["profiles", "list"], "profiles_command", ["list"]),
        (["profiles", "show", "my-model"], "profiles_command", ["show", "my-model"]),
        (["profiles", "sign", "FILE"], "profile_command", ["sign", "FILE"]),
        (["profiles", "keygen", "FILE"], "profile_command", ["keygen", "FILE"]),
        (["profiles", "verify", "FILE"], "profile_command", ["verify", "FILE"]),
    ],
)
def test_a_mistaken_name_leads_to_what_is_meant(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], module: str, given: list[str]
) -> None:
    seen: list[list[str]] = []
    stand_in = ModuleType(module)

    def main(words: list[str]) -> int:
        seen.append(words)
        return 0

    vars(stand_in)["main"] = main
    monkeypatch.setitem(sys.modules, f"verifier_pool.{module}", stand_in)
    assert countersign.main(asked) == 0
    assert seen == [given]


def test_a_model_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert countersign.main(["profile", "show", "no-such-model"]) == 1
    said = capsys.readouterr().err
    assert "no-such-model: No such file" in said
    assert "`countersign profiles show MODEL`" in said


def test_what_is_done_elsewhere_is_no_action_of_its_own() -> None:
    for (name, action), other in countersign.ACTIONS_ELSEWHERE.items():
        assert {name, other} <= countersign.COMMANDS.keys(), action
