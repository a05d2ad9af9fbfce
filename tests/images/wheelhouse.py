"""Wheels made of what is installed here, so that pip can install into a clean environment without an index."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import parse_tag, sys_tags
from packaging.utils import canonicalize_name

_LOCAL = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""What an installer wrote."""


def closure(requirements: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Installed distributions that these requirements lead to, by canonical name.

    Raises metadata.PackageNotFoundError when one that is needed is not installed.
    """
    found: dict[str, metadata.Distribution] = {}
    done: set[tuple[str, str]] = set()
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        installed = found.setdefault(name, metadata.distribution(requirement.name))
        for asked in ("", *requirement.extras):
            if (name, asked) not in done:
                done.add((name, asked))
                todo += [(Requirement(text), asked) for text in installed.requires or ()]
    return found


def pack(installed: metadata.Distribution, folder: Path) -> Path:
    """Write the wheel that this distribution was installed from, without what the installer made of it."""
    name = installed.metadata["Name"].replace("-", "_").replace(".", "_")
    tag = _tag(installed.read_text("WHEEL") or "")
    wheel = folder / f"{name}-{installed.version}-{tag}.whl"
    rows: list[tuple[str, str, str]] = []
    record = ""
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for path in installed.files or ():
            inside = str(path)
            if path.name == "RECORD" and path.parent.name.endswith(".dist-info"):
                record = inside
            # Scripts lie outside of the packages; pip makes them anew from the entry points.
            if inside.startswith("..") or "__pycache__" in path.parts or path.name in _LOCAL:
                continue
            source = Path(str(installed.locate_file(path)))
            data = source.read_bytes()
            entry = zipfile.ZipInfo(inside)
            entry.external_attr = source.stat().st_mode << 16  # some are programs
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((inside, f"sha256={digest}", str(len(data))))
        text = io.StringIO()
        csv.writer(text).writerows([*rows, (record, "", "")])
        archive.writestr(record, text.getvalue())
    return wheel


def _tag(description: str) -> str:
    given = [line.partition(":")[2].strip() for line in description.splitlines() if line.startswith("Tag:")]
    ours = set(sys_tags())
    tags = [tag for text in given for tag in parse_tag(text) if tag in ours]
    assert tags, (given, sys.version)
    return str(tags[0])
