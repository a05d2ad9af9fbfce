"""What the demo leaves for others to look at: of each backend an answer's evidence, and the page that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.demo.report import Row
from policies.errors import CountersignError

KEYS = "keys.json"


class ExhibitError(CountersignError):
    """Evidence of an answer could not be fetched or written; the message says which."""


def save(proxy: str, folder: Path, rows: Sequence[Row]) -> list[str]:
    """Write `NAME.countersign` and `NAME.html` for each backend, of its last answer, and the operator's keys.

    Returns: commands that check each of the files without this stack.

    Raises:
        ExhibitError: the proxy does not give it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with httpx.Client(base_url=proxy, trust_env=False, timeout=60.0) as client:
            _fetch(client, "/.well-known/countersign-keys.json", folder / KEYS)
            for row in rows:
                where = f"/v1/verifications/{row.outcomes[-1].verification['id']}"
                _fetch(client, f"{where}/evidence", folder / f"{row.backend}.countersign")
                _fetch(client, f"{where}/report", folder / f"{row.backend}.html")
    except (httpx.HTTPError, OSError) as error:
        raise ExhibitError(f"no evidence was saved: {type(error).__name__}: {error}") from error
    return [f"countersign verify {folder / row.backend}.countersign --keys {folder / KEYS}" for row in rows]


def _fetch(client: httpx.Client, path: str, file: Path) -> None:
    file.write_bytes(client.get(path).raise_for_status().content)
