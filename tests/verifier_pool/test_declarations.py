"""A runtime that changed: from an honest answer under the wrong declaration to the operator's acceptance."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from pathlib import Path

import pytest
from redis import Redis

from benchmarks.noise import command as noise_command
from policies.errors import SettingsError, StoreUnavailable
from policies.evidence import Evidence
from policies.settings import DurabilitySettings, Settings
from tests.policies import recorded
from tests.verifier_pool import rig
from tests.verifier_pool.told import events
from verifier_pool import declarations
from verifier_pool.link.queue import UNFOLDED, declaration_key
from verifier_pool.standing import Standings

WRONG, RIGHT = recorded.GPU, recorded.CPU


def rules(valkey_url: str, runtime: str = WRONG) -> Settings:
    backend = {"name": "honest", "url": "http://127.0.0.1:1", "model": "smollm2", "runtime": runtime}
    return Settings.model_validate(
        {
            "redis_url": valkey_url,
            "models": {"smollm2": {"vocab_size": recorded.VOCABULARY, "eos_token_ids": [recorded.EOS]}},
            "backends": [backend],
        }
    )


def honest(runtime: str = WRONG, temperature: float | None = None) -> Evidence:
    """A CPU server's answer, as its backend declares it."""
    longest = max(recorded.cpu("bf16"), key=lambda answer: len(answer.output_ids))
    if temperature == 0:
        longest = max(recorded.gpu("T0"), key=lambda answer: len(answer.output_ids))
    return dataclasses.replace(longest, id=secrets.token_hex(16), runtime=runtime, owner="0" * 64)


def selection_of(redis: Redis, settings: Settings, answer: Evidence) -> tuple[str, str]:
    """Result and reason of the selection check, through a worker."""
    id = rig.submit(redis, settings, [answer])
    rig.worker(redis, settings).serve(burst=True)
    checks = rig.verdict_of(redis, id)["checks"]
    found = next(check for check in checks if check["name"] == "selection")
    return found["result"], found["reason"]


def accept(redis: Redis) -> list[str]:
    return declarations.accept(redis, "honest", DurabilitySettings(), "test", 100)


def test_a_changed_runtime_expires_the_declaration_until_the_operator_acts(
    redis: Redis, valkey_url: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = rules(valkey_url)
    with caplog.at_level(logging.ERROR, logger="verifier_pool.declarations"):
        result, reason = selection_of(redis, settings, honest())
    assert result == "inconclusive"
    assert reason.startswith("runtime_changed")
    assert RIGHT in reason
    (alert,) = [record for record in caplog.records if record.name == "verifier_pool.declarations"]
    assert "honest" in alert.getMessage()
    assert RIGHT in alert.getMessage()
    assert declarations.entries(redis, "honest")[WRONG]["fits"] == RIGHT
    assert declarations.counted(redis) == {"honest": 1}
    (changed,) = Standings(redis, settings).records("honest").values()
    assert changed.state == "suspect"
    assert RIGHT in changed.change

    # From now on nothing is said at T > 0 under that declaration; T = 0 needs no noise.
    assert selection_of(redis, settings, honest())[1].startswith("declaration_expired")
    assert selection_of(redis, settings, honest(temperature=0))[0] == "pass"
    assert declarations.counted(redis) == {"honest": 1}

    # Another declaration is another matter.
    assert selection_of(redis, rules(valkey_url, RIGHT), honest(RIGHT)) == ("pass", "")

    config = tmp_path / "countersign.yaml"
    config.write_text(settings.model_dump_json())
    assert noise_command.main(["status", "--config", str(config)]) == 0
    assert f"honest  {WRONG}  expired" in capsys.readouterr().out
    assert noise_command.main(["accept", "honest", "--config", str(config)]) == 0
    assert WRONG in capsys.readouterr().out
    assert declarations.entries(redis, "honest") == {}
    assert {record.change for record in Standings(redis, settings).records("honest").values()} == {""}
    assert selection_of(redis, settings, honest())[1].startswith("runtime_changed")
    assert declarations.counted(redis) == {"honest": 2}


def test_one_choice_of_several_is_enough(redis: Redis, valkey_url: str) -> None:
    first = honest()
    second = dataclasses.replace(honest(RIGHT), id=first.id, index=1)
    settings = rules(valkey_url)
    rig.submit(redis, settings, [dataclasses.replace(second, index=0), dataclasses.replace(first, index=1)])
    rig.worker(redis, settings).serve(burst=True)
    # The declaration is the response's.
    assert declarations.entries(redis, "honest")


def test_standing_hears_of_a_change_once_and_of_its_acceptance(redis: Redis, valkey_url: str) -> None:
    settings = rules(valkey_url)
    hook = {"url": "https://example.com/hook", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
    settings = Settings.model_validate(settings.model_dump() | {"webhook": hook})
    for _ in range(3):
        selection_of(redis, settings, honest())
    assert sorted(event["type"] for event in events(redis)) == ["backend.runtime_changed", "backend.suspect"]

    # Accepting asks for a fold, and outdates one that read the old entry and has not written yet.
    here = Standings(redis, settings)
    late = here._read("honest")
    accept(redis)
    assert redis.sismember(UNFOLDED, "honest")
    assert not here._commit(late, here._folded(late, 1.0), 1.0)
    here.fold_left()
    (record,) = here.records("honest").values()
    assert (record.change, record.state) == ("", "trial")
    assert not redis.exists(UNFOLDED, declaration_key("honest"))


def test_accepting_what_never_changed_leaves_nothing_behind(redis: Redis, valkey_url: str) -> None:
    settings = rules(valkey_url)
    assert accept(redis) == []
    Standings(redis, settings).fold_left()
    assert Standings(redis, settings).records("honest") == {}
    assert not redis.exists(UNFOLDED)


def test_commands_refuse_what_they_do_not_know(valkey_url: str, tmp_path: Path) -> None:
    config = tmp_path / "countersign.yaml"
    config.write_text(rules(valkey_url).model_dump_json())
    with pytest.raises(SettingsError, match="BACKEND"):
        noise_command.main(["accept", "other", "--config", str(config)])
    with pytest.raises(SettingsError, match=r"backends\.honest\.trusted"):
        noise_command.main(["detect", "--backend", "honest", "--config", str(config)])
    config.write_text(rules(f"unix://{tmp_path}/none.sock").model_dump_json())
    with pytest.raises(StoreUnavailable):
        noise_command.main(["status", "--config", str(config)])


def test_nothing_expires_without_a_change(redis: Redis, valkey_url: str) -> None:
    settings = rules(valkey_url, RIGHT)
    assert selection_of(redis, settings, honest(RIGHT)) == ("pass", "")
    assert not declarations.expired(redis, "honest", RIGHT)
    assert accept(redis) == []
