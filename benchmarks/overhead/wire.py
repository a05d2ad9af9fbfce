"""From time-stamped reads of a socket to the events of a response and when each of them was complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

Read = tuple[float, bytes]
"""Seconds on the event loop's clock, and the bytes that had come by then."""

VERDICT = b": countersign "
PENDING = "pending"


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One streamed response.

    Attributes:
        status: HTTP status.
        headers: names in lower case.
        text: concatenated content of all tokens.
        token_times: float64 (tokens,), when each content event was complete; seconds on the loop's clock.
        finished: when the last byte came.
        verdict: the verdict in the stream's comment, `pending` when it did not come in time, None without one.
        prompt, billed: tokens of prompt and answer as `usage` has them; None without it.
    """

    status: int
    headers: dict[str, str]
    text: str
    token_times: NDArray[np.float64]
    finished: float
    verdict: str | None
    prompt: int | None = None
    billed: int | None = None


def parse(reads: list[Read]) -> Response:
    """Raises ValueError with a short reason when this is not a whole, healthy stream."""
    if not reads:
        raise ValueError("no answer")
    raw = b"".join(data for _, data in reads)
    head, end, _ = raw.partition(b"\r\n\r\n")
    if not end:
        raise ValueError("no headers")
    status, headers = _head(head)
    if status != 200:
        raise ValueError(f"status {status}")
    if headers.get("transfer-encoding") != "chunked":
        raise ValueError("not a stream")
    times = np.array([time for time, _ in reads])
    ends = np.cumsum([len(data) for _, data in reads])
    payload, positions = _dechunk(raw, len(head) + 4)
    events, stops = _events(payload)
    arrived = times[np.searchsorted(ends, positions[stops - 1] + 1)]
    text, token_times, verdict, (prompt, billed) = _read(events, arrived)
    return Response(status, headers, text, np.array(token_times), float(times[-1]), verdict, prompt, billed)


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    try:
        status = int(first.split(" ", 2)[1])
    except (IndexError, ValueError):
        raise ValueError("not HTTP") from None
    pairs = (line.partition(":") for line in lines)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _dechunk(raw: bytes, start: int) -> tuple[bytes, NDArray[np.int64]]:
    """The body, and where in `raw` each of its bytes lies."""
    pieces: list[bytes] = []
    positions: list[NDArray[np.int64]] = []
    while True:
        line_end = raw.find(b"\r\n", start)
        if line_end < 0:
            raise ValueError("cut short")
        size = int(raw[start:line_end].split(b";")[0], 16)
        if size == 0:
            return b"".join(pieces), np.concatenate(positions) if positions else np.zeros(0, np.int64)
        start = line_end + 2
        if len(raw) < start + size + 2:
            raise ValueError("cut short")
        pieces.append(raw[start : start + size])
        positions.append(np.arange(start, start + size))
        start += size + 2


def _events(payload: bytes) -> tuple[list[bytes], NDArray[np.int64]]:
    """Events without their blank line, and the offset after each."""
    parts = payload.split(b"\n\n")
    if parts.pop():
        raise ValueError("cut short")
    return parts, np.cumsum([len(part) + 2 for part in parts], dtype=np.int64)


Usage = tuple[int | None, int | None]


def _read(events: list[bytes], arrived: NDArray[np.float64]) -> tuple[str, list[float], str | None, Usage]:
    usage: Usage = (None, None)
    words: list[str] = []
    times: list[float] = []
    verdict = None
    for event, time in zip(events, arrived, strict=True):
        if event.startswith(VERDICT):
            verdict = orjson.loads(event[len(VERDICT) :])["verdict"] or PENDING
        elif event.startswith(b"data: {"):
            frame = orjson.loads(event[6:])
            if "error" in frame:
                raise ValueError("error frame")
            content = "".join(map(_content, frame["choices"]))
            if frame.get("usage"):
                usage = frame["usage"].get("prompt_tokens"), frame["usage"].get("completion_tokens")
            # A completion's part is a token even where its text is empty, as half a character's is.
            if content or any("text" in choice for choice in frame["choices"]):
                words.append(content)
                times.append(float(time))
    if not events or events[-1] != b"data: [DONE]":
        raise ValueError("no [DONE]")
    return "".join(words), times, verdict, usage


def _content(choice: dict[str, Any]) -> str:
    """What a part of a choice adds to its text, in a chat or in a completion."""
    return (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
