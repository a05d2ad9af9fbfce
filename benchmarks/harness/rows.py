"""Raw rows on disk, one JSON object a line: appended as they are measured, read back to go on or to report."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from policies.errors import CountersignError

Row = dict[str, Any]

_PATH = re.compile(r"""(?:file://|(?<![\w/:.~])~?)(?:/[^\s/:'",;()<>\[\]]+){2,}/?""")


class Rows:
    """One file of rows. A line that a killed run left half written is dropped when the file is opened.

    Args:
        columns: what every row must have.
    """

    def __init__(self, path: Path, columns: Collection[str] = ()) -> None:
        self.path = path
        self._columns = columns
        _mend(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and see that it is on disk: the next run may kill the machine."""
        row = {**row, **({"error": unplaced(row["error"])} if "error" in row else {})}
        with self.path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Row]:
        return iter(read(self.path, self._columns))


def read(path: Path, columns: Collection[str] = ()) -> list[Row]:
    """The rows of a file; none when there is no such file. Raises CountersignError when a whole line is no row."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or set(columns) - {*row}:
            raise CountersignError(f"{path}, line {number}: no row of this benchmark")
        rows.append(row)
    return rows


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as CSV, the columns in the order in which they come; nothing for None, and for no rows an empty file.

    What lies inside a value has a column of its own, `outer.inner`; lists are JSON.
    """
    lines = [dict(_flat(row)) for row in rows]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        if columns:
            writer.writeheader()
        writer.writerows(lines)


def _flat(row: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{outer}{name}.")
        else:
            yield (
                f"{outer}{name}",
                json.dumps(value) if isinstance(value, list | tuple) else "" if value is None else value,
            )


def told(error: BaseException) -> str:
    """What a row says of what broke it off."""
    return f"{type(error).__name__}: {error}"[:300]


def unplaced(value: Any) -> Any:
    """JSON without the folders of this machine: of paths, also inside texts, the last part is left."""
    if isinstance(value, str):
        return _PATH.sub(lambda found: os.path.basename(found[0].rstrip("/")), value)
    if isinstance(value, dict):
        return {key: unplaced(each) for key, each in value.items()}
    return [unplaced(each) for each in value] if isinstance(value, list | tuple) else value


def rounded(value: Any, digits: int = 3) -> Any:
    """JSON whose numbers have so many decimals."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items()}
    return [rounded(each, digits) for each in value] if isinstance(value, list | tuple) else value


def _mend(path: Path) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)
