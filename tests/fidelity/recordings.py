"""What real vLLM servers said, read without a line of the proxy's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDERS = sorted((Path(__file__).parents[1] / "data").glob("vllm-*"))


class Recording:
    """One request of an index, with its bodies: as the proxy asks (`body`), and as the client asked (`plain`)."""

    def __init__(self, folder: Path, row: dict[str, Any]) -> None:
        name: str = row["name"]
        self._stem = folder / name
        self.label = f"{folder.name}-{name}"
        self.chat: bool = row["endpoint"] == "chat"
        self.stream: bool = row["stream"]
        self.status: int = row["status"]
        self.body = self._bytes(".body")
        self.plain = self._bytes(".plain.body")
        self.plain_request: dict[str, Any] = json.loads(self._bytes(".plain.request.json"))

    def _bytes(self, suffix: str) -> bytes:
        return self._stem.with_name(self._stem.name + suffix).read_bytes()


RECORDINGS = [Recording(folder, row) for folder in FOLDERS for row in json.loads((folder / "index.json").read_text())]
ANSWERS = [recording for recording in RECORDINGS if recording.status == 200]
