"""The Dockerfile's facts, and what its linter says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import countersign
from tests.images.dockerfile import DOCKERFILE, IGNORED, ROOT, copied_from_context, instructions, let_in, stages
from verifier_pool import ready


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


def test_targets_have_a_base_by_argument() -> None:
    assert {"proxy", "verifier"} <= stages().keys()
    given = dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG")
    for stage in stages().values():
        assert re.fullmatch(r"\$\{(\w+)_IMAGE\}\$\{\1_DIGEST:\+@\$\{\1_DIGEST\}\}", stage.base), stage.base
    assert stages()["proxy"].base.startswith("${PYTHON_")
    assert stages()["verifier"].base.startswith("${VLLM_")
    assert given["PYTHON_DIGEST"] == given["VLLM_DIGEST"] == ""
    assert given["PYTHON_IMAGE"].startswith("python:3.")
    assert "slim" in given["PYTHON_IMAGE"]
    assert given["VLLM_IMAGE"].startswith("vllm/vllm-openai:v0.32")


@pytest.mark.parametrize(("target", "command"), [("proxy", "serve"), ("verifier", "worker")])
def test_targets_run_their_command_unprivileged(target: str, command: str) -> None:
    stage = stages()[target]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", stage.last("USER"))
    assert stage.lines.index(("USER", stage.last("USER"))) > max(
        stage.lines.index(("RUN", rest)) for rest in stage.all("RUN")
    )
    assert json.loads(stage.last("ENTRYPOINT")) == ["countersign"]
    assert json.loads(stage.last("CMD")) == [command]
    assert command in countersign.COMMANDS
    assert "countersign" in project()["scripts"]


def test_both_targets_run_as_the_user_the_chart_names() -> None:
    chart = (ROOT / "helm/templates/_helpers.tpl").read_text()
    for target in ("proxy", "verifier"):
        user, group = stages()[target].last("USER").split(":")
        assert f"runAsUser: {user}" in chart
        assert f"runAsGroup: {group}" in chart


def test_proxy_is_checked_where_it_listens() -> None:
    stage = stages()["proxy"]
    assert stage.last("EXPOSE") == "8700"
    given = dict(part.split("=", 1) for part in stage.last("ENV").split())
    # A container's own loopback is nobody's. The chart sets this, too; what else it sets, an image must not override.
    settings = {name: value for name, value in given.items() if name.startswith("COUNTERSIGN_")}
    assert settings.pop("COUNTERSIGN_HOST") == "0.0.0.0"
    assert set(settings) == {"COUNTERSIGN_CONFIG"}
    check = json.loads(stage.last("HEALTHCHECK").partition("CMD ")[2])
    assert "/healthz" in check[-1]
    compile(check[-1], "healthcheck", "exec")


def test_the_verifier_is_checked_as_its_own_command_works() -> None:
    stage = stages()["verifier"]
    flags, _, command = stage.last("HEALTHCHECK").partition(" CMD ")
    words = json.loads(command)
    assert words[:3] == ["python3", "-m", "verifier_pool.ready"]
    arguments = ready._parser().parse_args(words[3:])
    assert arguments.alive
    assert arguments.only is None
    assert "--start-period=30m" in flags


def test_installs_name_extras_that_exist() -> None:
    extras = project()["optional-dependencies"]
    asked = re.findall(r"\$\{wheel\}\[([\w,-]+)\]", DOCKERFILE.read_text())
    assert asked == ["embedded", "vllm"]
    assert {name for group in asked for name in group.split(",")} <= extras.keys()
    assert not any(re.match(r"(vllm|torch)\b", line) for line in project()["dependencies"] + extras["embedded"])


def test_no_secret_is_baked_in() -> None:
    secret = re.compile(r"(api_?key|token|password|secret)", re.IGNORECASE)
    for name, rest in instructions():
        if name in {"ARG", "ENV", "LABEL"}:
            assert not secret.search(rest), rest


def test_only_named_paths_enter_the_build() -> None:
    sources = copied_from_context()
    assert not {".", "./", "*"} & set(sources)
    assert not any("ADD" in dict(stage.lines) for stage in stages().values())
    rules = [line for line in IGNORED.read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    for source in sources:
        path = f"{source}/file.py" if (ROOT / source).is_dir() else source
        assert let_in(path), source


@pytest.mark.parametrize(
    "path",
    [
        "countersign.env",
        "countersign.yaml",
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "models/m/model.safetensors",
        "benchmarks/results/cost/summary.md",
        "proxy/__pycache__/app.cpython-312.pyc",
    ],
)
def test_what_is_private_or_large_stays_outside(path: str) -> None:
    assert not let_in(path)


def test_wheel_packages_are_copied() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = " ".join(stages()["wheel"].all("COPY")).split()
    assert set(built["only-include"]) <= set(copied)
    for name in ("pyproject.toml", project()["readme"], *project()["license-files"]):
        assert name in copied


def test_hadolint_has_nothing_to_say() -> None:
    binary = Path(sys.executable).with_name("hadolint")
    report = subprocess.run([binary, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (report.returncode, report.stdout) == (0, "")


LEAN = """
import importlib, sys
for name in ("vllm", "torch", "transformers", "triton", "openai", "matplotlib"):
    sys.modules[name] = None  # importing it fails
for name in sys.argv[1:]:
    importlib.import_module(name)
from policies.settings import ReferenceSettings
from verifier_pool.reference import open_reference
open_reference("m", ReferenceSettings(kind="vllm_http", url="http://127.0.0.1:9")).close()
"""


def test_what_runs_in_the_proxy_image_needs_no_engine() -> None:
    """The proxy, CPU workers, references of kind vllm_http, the webhook sender, probes and the operator's commands."""
    operators = [name for name, _ in countersign.COMMANDS.values() if name.startswith(("proxy.", "verifier_pool."))]
    modules = [*operators, "verifier_pool.jobs", "verifier_pool.replay_loop", "verifier_pool.webhooks"]
    command = [sys.executable, "-c", LEAN, *modules, "verifier_pool.ready"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "verifier_pool.worker" in modules
