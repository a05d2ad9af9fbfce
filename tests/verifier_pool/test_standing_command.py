"""`countersign standing` against a real Valkey: what it shows of any record, and what an operator decides."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

import countersign
from policies import standing
from policies.record import Entry
from policies.settings import Settings
from policies.unit import Unit, declaration_name, declaration_of
from tests.support.valkey import Valkey
from verifier_pool import standing_command, standing_text, terminal
from verifier_pool.link.queue import (
    SECOND_UNCHECKED,
    STANDINGS,
    UNFOLDED,
    UNITS_DROPPED,
    standing_field,
    standing_key,
    units_key,
)
from verifier_pool.standing import Standings

NOW = 1_764_000_000.0
CLEAN = {"selection": (0.0, 0.0), "structure": (0.0, 0.0), "withheld": (0.0, 0.0), "distance": (0.0, 0.02)}
CHEAT = {**CLEAN, "selection": (1.0, 0.0), "distance": (1.0, 0.02)}
FAR = {**CLEAN, "distance": (1.0, 0.02)}


def rules(redis_url: str, *names: str, precision: str = "bf16") -> Settings:
    backends = [
        {"name": name, "url": "http://127.0.0.1:1", "model": "m", "precision": precision} for name in names or ["a"]
    ]
    return Settings.model_validate({"redis_url": redis_url, "models": {"m": {}}, "backends": backends})


def unit(
    settings: Settings, number: int, outcomes: dict[str, tuple[float, float]], name: str = "a", **more: Any
) -> Unit:
    plain = Unit(
        id=f"{number:032x}",
        at=NOW + number,
        backend=name,
        declaration=declaration_of(settings.backend(name)),
        key=f"key{number % 4}",
        unit=f"u{number}",
        prompt=f"p{number}",
        tokens=100,
        audited=True,
        replayed=True,
        outcomes=outcomes,
        profile="profile",
        delta=0.01,
    )
    return msgspec.structs.replace(plain, **more)


def count(redis: Redis, settings: Settings, units: Sequence[Unit]) -> None:
    """As workers do it: into the list, then into the record."""
    for one in units:
        redis.rpush(units_key(one.backend), msgspec.json.encode(one))
        redis.sadd(UNFOLDED, one.backend)
    for name in {one.backend for one in units}:
        Standings(redis, settings).fold(name)


class Command:
    """Runs the console script with settings from a file."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._config = folder / "countersign.yaml"
        self._capsys = capsys

    def use(self, settings: Settings) -> Settings:
        self._config.write_text(settings.model_dump_json())
        return settings

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        try:
            code = countersign.main(["standing", *arguments, "--config", str(self._config)])
        except SystemExit as end:
            code = int(end.code or 0)
        said = self._capsys.readouterr()
        assert said.out.replace("\n", "").isprintable() or "usage:" in said.out
        return code, said.out, said.err


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def test_nothing_is_known_yet(redis: Redis, valkey_url: str, command: Command) -> None:
    command.use(rules(valkey_url, "first", "second"))
    code, out, _ = command()
    assert code == 0
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [["first", "trial", "-"], ["second", "trial", "-"]]
    assert out.count(standing_text.UNHEARD) == 2
    code, out, _ = command("first")
    assert code == 0
    assert "first: trial. It is served from" in out
    assert "Evidence 0; 2e6 (1/alpha, of this life) accuses" in out
    assert "Coverage: nothing served yet" in out
    assert "┄" not in out

    command.use(Settings.model_validate({"redis_url": valkey_url}))
    assert command() == (0, "no backends: the settings name none, and none has a record\n", "")


def test_a_cheat_is_shown_whole(redis: Redis, valkey_url: str, command: Command) -> None:
    settings = command.use(rules(valkey_url, "a", "good"))
    silent = unit(settings, 900, {}, tokens=40, undecided="no_logprobs", blame="backend")
    away = unit(settings, 901, {}, tokens=60, undecided="client_left", blame="request")
    count(redis, settings, [unit(settings, n, CLEAN) for n in range(1, 201)])
    count(redis, settings, [silent, away, *(unit(settings, n, CHEAT) for n in range(201, 212))])
    count(redis, settings, [unit(settings, n, CLEAN, "good") for n in range(1, 3)])
    redis.hset(UNITS_DROPPED, "a", 7)
    redis.hset(SECOND_UNCHECKED, "a", 5)

    code, out, _ = command()
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 1
    assert "quarantined" in rows["a"]
    assert "accused by" in rows["a"]
    assert "trial" in rows["good"]
    assert command("good")[0] == 0

    code, out, _ = command("a")
    record = Standings(redis, settings).records("a")[declaration_name(declaration_of(settings.backend("a")))]
    accused = record.accused
    assert accused is not None
    assert code == 1
    assert out.startswith("a: quarantined since 2025-11-24 ")
    assert f"at unit {accused.n}, level" in " ".join(out.split())
    assert out.count("┄") > 50
    assert "•" in out
    assert "Level" in out
    assert "Coverage 99.5 %: 21,100 of 21,200 output tokens decided (213 answers, 213 audited" in " ".join(out.split())
    assert re.search(r"client_left +1 +60 +the request\n", out)
    assert re.search(r"no_logprobs +1 +40 +the backend\n", out)
    assert re.search(rf"{211:032x}  2025-11-24 \d\d:\d\d  selection, distance\n", out)
    cap = "Client keys that spoke on 2025-11-24: 4; each counts for 32 units a day, and ever more rarely then"
    assert cap in " ".join(out.split())
    assert "7 were lost" in out
    assert "5 lost their replayed checks" in out
    assert "countersign: quarantined, trusted to quarantined: accused" in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_level_is_spelt_out(redis: Redis, valkey_url: str, command: Command) -> None:
    settings = command.use(rules(valkey_url))
    count(redis, settings, [unit(settings, n, FAR) for n in range(1, 40)])
    code, out, _ = command("a")
    assert code == 1
    assert "Level 0.01 = alpha 1e-6 + delta 0.01 (the errors of the calibrations)" in out
    found = json.loads(command("a", "--json")[1])
    assert found["evidence"]["level"] == pytest.approx(1e-6 + 0.01)
    assert found["evidence"]["accused"]["basis"] == "replayed"

    exact = {**CLEAN, "selection": (1.0, 0.0)}
    other = command.use(rules(valkey_url, "b"))
    count(redis, other, [unit(other, n, exact, "b") for n in range(1, 12)])
    assert "Level 1e-6 = alpha 1e-6 (exact checks suffice" in " ".join(command("b")[1].split())


def test_redeclared_and_removed_backends(redis: Redis, valkey_url: str, command: Command) -> None:
    settings = command.use(rules(valkey_url))
    count(redis, settings, [unit(settings, n, CHEAT) for n in range(1, 12)])
    assert command()[0] == 1

    command.use(rules(valkey_url, precision="fp8"))
    code, out, _ = command()
    assert code == 0
    assert out.splitlines()[1].split()[:3] == ["a", "trial", "-"]
    code, out, _ = command("a")
    assert code == 0
    assert "Evidence 0; 6e6 (1/alpha, of this life) accuses" in out
    assert "Records under other declarations" in out
    assert re.search(r" 1  quarantined  2025-11-24 .* m, bf16\n", out)

    command.use(rules(valkey_url, "new"))
    code, out, _ = command()
    assert code == 0
    assert standing_text.UNDECLARED in out.splitlines()[2]
    code, out, _ = command("a")
    assert code == 0
    assert out.startswith("a: quarantined since")
    assert f"- {standing_text.UNDECLARED}" in out
    code, _, err = command("a", "--pardon", "--why", "gone")
    assert code == 3
    assert "'BACKEND': one that the settings name: new" in err


def test_an_operator_decides(redis: Redis, valkey_url: str, command: Command) -> None:
    settings = command.use(rules(valkey_url))
    count(redis, settings, [unit(settings, n, CLEAN) for n in range(1, 5)])
    code, out, _ = command("a", "--quarantine", "--why", "looks odd", "--by", "ada")
    assert (code, out) == (0, "a: quarantined by hand. It is quarantined now (by hand: looks odd)\n")
    assert command()[0] == 1
    assert "ada: quarantine, trial to quarantined: looks odd" in command("a")[1]
    code, out, err = command("a", "--quarantine", "--why", "twice")
    assert (code, out) == (1, "")
    assert err == "countersign standing: a: it is quarantined by hand already\n"
    assert command("a", "--release", "--why", "was wrong", "--by", "ada")[1].startswith("a: released. It is trial now")

    count(redis, settings, [unit(settings, n, CHEAT) for n in range(10, 30)])
    code, _, err = command("a", "--release", "--why", "accused by evidence")
    assert code == 1
    assert "it is not quarantined by hand" in err
    assert command("a", "--pardon", "--why", "new machine")[0] == 0
    code, out, _ = command("a")
    assert code == 0
    assert "in its life 2" in out
    assert "Life 2 has 1/6 of alpha, 1.7e-7" in " ".join(out.split())
    assert "pardon, quarantined to trial: new machine" in out
    assert json.loads(command("a", "--quarantine", "--why", "x", "--json")[1])["state"] == "quarantined"


def test_an_unheard_backend_can_be_quarantined(redis: Redis, valkey_url: str, command: Command) -> None:
    command.use(rules(valkey_url))
    assert command("a", "--quarantine", "--why", "not yet")[0] == 0
    assert command("a")[1].startswith("a: quarantined since ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", "--quarantine"),
        ("a", "--pardon", "--release", "--why", "both"),
        ("--quarantine", "--why", "whom"),
        ("a", "--why", "what for"),
        ("a", "--by", "me"),
        ("a", "--quarantine", "--why", "  "),
        ("a", "--quarantine", "--why", "x" * 1001),
        ("a", "--quarantine", "--why", "\x1b[2J"),
        ("a", "--quarantine", "--why", "\udc80"),
    ],
)
def test_wrong_usage(redis: Redis, valkey_url: str, command: Command, arguments: tuple[str, ...]) -> None:
    command.use(rules(valkey_url))
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert "countersign standing: error:" in err
    assert redis.keys() == []


def test_errors_say_what_is_wrong(redis: Redis, valkey_url: str, command: Command, tmp_path: Path) -> None:
    command.use(rules(valkey_url))
    code, out, err = command("other")
    assert (code, out) == (3, "")
    assert "'BACKEND': one that the settings name, or that has a record: a" in err
    redis.hset(standing_key("a"), "0123456789abcdef", b"\xc1 no record")
    for arguments in ((), ("a",), ("a", "--pardon", "--why", "x")):
        code, out, err = command(*arguments)
        assert (code, out) == (1, "")
        assert "a: its record cannot be read" in err
    command.use(rules(valkey_url, "a", "b"))
    code, out, err = command()  # one that cannot be read hides no other
    assert code == 1
    assert out.splitlines()[1].startswith("b  ")
    assert "a: its record cannot be read" in err
    assert command("\udc80")[0] == 3
    command.use(rules(f"unix://{tmp_path}/none.sock"))
    for arguments in ((), ("a",), ("a", "--pardon", "--why", "x")):
        code, out, err = command(*arguments)
        assert (code, out) == (1, "")
        assert "Redis does not answer (ConnectionError)" in err


def test_a_redis_that_is_silent_is_given_up(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_command, "TIMEOUT", 0.2)
    with Valkey() as server:
        command.use(rules(server.url))
        assert command()[0] == 0
        server.freeze()
        code, out, err = command()
        server.thaw()
    assert (code, out) == (1, "")
    assert "Redis does not answer (TimeoutError)" in err


def test_hostile_names_are_never_printed_raw(redis: Redis, valkey_url: str, command: Command) -> None:
    settings = rules(valkey_url)
    evil = "x\x1b[31m\n\u202eb\x9b"
    record = standing.new(evil, {"model": evil, "engine": evil}, 1, NOW)
    left = {
        "\x1b]0;": standing.fold(
            record, [unit(settings, 1, {}, undecided="\x1b]0;", blame="\x07")], set(), settings.standing
        )
    }
    record = left["\x1b]0;"].record
    entry = Entry(NOW, "\x1b[A", "\x9b", "\r\x00", "trial", "\u202e")
    record = msgspec.structs.replace(record, trail=(*record.trail, entry), reasons=("\x1b[2J",))
    redis.hset(standing_key(evil), record.name, standing.pack(record))
    redis.hset(STANDINGS, standing_field(evil, record.name), b"{}")
    command.use(settings)
    for arguments in ((), (evil,), ("--json",), (evil, "--json")):  # `command` looks at what is printed
        code, out, _ = command(*arguments)
        assert code == 0
        assert "\\x1b" in out or "\\u001b" in out


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [10, 24, 40, 80, 100, 300])
def test_a_terminal_is_never_too_narrow(
    redis: Redis, valkey_url: str, command: Command, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = command.use(rules(valkey_url, "a", "a-backend-with-a-long-name.example"))
    count(redis, settings, [unit(settings, n, CHEAT if n > 200 else CLEAN) for n in range(1, 212)])
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in ((), ("a",)):
        terminal_out = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal_out)
            command(*arguments)
        lines = terminal_out.getvalue().splitlines()
        assert max(map(terminal.columns, lines)) <= (min(columns, 100) if arguments else columns)
        assert any(line.startswith("a") for line in lines)


def test_an_ascii_stream_gets_ascii(
    redis: Redis, valkey_url: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = command.use(rules(valkey_url))
    count(redis, settings, [unit(settings, n, CLEAN) for n in range(1, 5)])
    command("a", "--quarantine", "--why", "Prüfung")
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        command("a")
    stream.seek(0)
    shown = stream.read()
    assert "by hand: Pr\\xfcfung" in shown
    assert "*" in shown
    assert "-----" in shown


def test_lines_for_other_programs_are_whole(redis: Redis, valkey_url: str, command: Command) -> None:
    command.use(rules(valkey_url, *(f"backend-{n}" for n in range(3))))
    why = "a long story " * 20
    command("backend-1", "--quarantine", "--why", why)
    assert " ".join(why.split()) in command()[1]
    found = [json.loads(line) for line in command("--json")[1].splitlines()]
    assert [one["backend"] for one in found] == ["backend-0", "backend-1", "backend-2"]
    assert [one["state"] for one in found] == ["trial", "quarantined", "trial"]
    assert found[0]["since"] is None
    assert found[0]["evidence"]["log10"] is None
    assert found[0]["declared"] is True


def test_a_record_that_keeps_changing(
    redis: Redis, valkey_url: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_meanwhile(self: Standings, found: object, made: object, now: float, *, durably: bool = False) -> bool:
        return False

    command.use(rules(valkey_url))
    monkeypatch.setattr(Standings, "_commit", written_meanwhile)
    code, out, err = command("a", "--quarantine", "--why", "x")
    assert (code, out) == (1, "")
    assert "a: its record keeps changing; nothing was done, try again" in err


def test_the_help_says_what_the_exit_code_means(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    assert "exit code 0: none of the backends shown is quarantined" in out
    assert standing_command.__doc__ is not None
