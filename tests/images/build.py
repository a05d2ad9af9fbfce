"""Runs a stage of the Dockerfile without a container engine, for what its RUN steps do with Python.

What is real: the shell, pip, the build backend, the files that COPY and .dockerignore let in, environments made anew,
and accounts where the tests run as root. What stands in: a base image is an empty environment of this Python, a folder
plays `/`, its paths are written into the commands, and pip installs from wheels of what is installed here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.images.dockerfile import ROOT, Stage, let_in

_ACCOUNTS = ("groupadd", "useradd")
_STRICT = "set -e\n"


class Build:
    """Stages that were run, each in a folder that plays its `/`."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.folder = folder
        self.wheels = wheels
        self.roots: dict[str, Path] = {}

    def run(self, name: str, stage: Stage, base: Path) -> Path:
        """Run a stage on a base, the folder of an environment; returns the stage's `/`."""
        root = self.roots[name] = self.folder / name
        (root / "etc").mkdir(parents=True)
        environ = self._environ(base, root)
        here = root
        for word, rest in stage.lines:
            if word == "WORKDIR":
                here = root / rest.lstrip("/")
                here.mkdir(parents=True, exist_ok=True)
            elif word == "COPY":
                self._copy(rest, root, here)
            elif word == "ENV":
                for part in rest.split():
                    key, _, value = part.partition("=")
                    environ[key] = self._inside(value, root).replace("$PATH", environ["PATH"])
            elif word == "RUN":
                self.shell(rest, root, here, environ)
        return root

    def shell(self, command: str, root: Path, here: Path, environ: dict[str, str]) -> None:
        """Run one command as `RUN` does. Raises AssertionError with what it said where it fails."""
        text = _STRICT + self._inside(command, root)
        done = subprocess.run(
            ["/bin/sh", "-c", text], cwd=here, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    def _inside(self, text: str, root: Path) -> str:
        """Text with every path of the image's own in it moved below the folder that plays `/`."""
        return re.sub(r"(?<![\w./}-])/(?=(wheels|source|opt|home|etc)\b)", f"{root}/", text)

    def _copy(self, rest: str, root: Path, here: Path) -> None:
        given, *parts = rest.split()
        *sources, target = parts if given.startswith("--from=") else [given, *parts]
        to = root / target.lstrip("/") if target.startswith("/") else here / target
        if given.startswith("--from="):
            (source,) = sources
            to.parent.mkdir(parents=True, exist_ok=True)
            # Its scripts hold their interpreter's path, so the environment cannot be moved.
            to.symlink_to(self.roots[given.removeprefix("--from=")] / source.lstrip("/"))
            return
        for source in sources:
            _copy_from_context(source, to / source if target.endswith("/") else to)

    def _environ(self, base: Path, root: Path) -> dict[str, str]:
        shims = root / ".accounts"
        shims.mkdir()
        for name in _ACCOUNTS:
            _shim(shims / name, root)
        for name in ("passwd", "group", "shadow", "gshadow"):
            (root / "etc" / name).touch()
        return {
            "PATH": f"{shims}:{base / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_COMPILE": "0",  # pip takes it as what `compile` is
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }


def empty_environment(folder: Path) -> Path:
    """A new environment with nothing but Python and pip."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
    return folder


def _shim(path: Path, root: Path) -> None:
    """An account is made below the stage's folder, where this is allowed."""
    real = shutil.which(path.name, path="/usr/sbin:/usr/bin")
    allowed = real is not None and os.geteuid() == 0
    path.write_text(f'#!/bin/sh\nexec {real} --prefix {root} "$@"\n' if allowed else "#!/bin/sh\nexit 0\n")
    path.chmod(0o755)


def _copy_from_context(source: str, to: Path) -> None:
    start = ROOT / source
    paths = [path for path in start.rglob("*") if path.is_file()] if start.is_dir() else [start]
    for path in paths:
        if not let_in(str(path.relative_to(ROOT))):
            continue
        target = to / path.relative_to(start) if start.is_dir() else to
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
