"""A webhook receiver on a real socket that answers what the test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.support.toy_http import Handler, served

Answer = Callable[[BaseHTTPRequestHandler], None]


class Receiver:
    """Remembers every request; answers with `answers` in turn, the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["content-length"])
        body = handler.rfile.read(length)
        if len(body) < length:
            return  # its sender was killed over it
        self.requests.append(({name.lower(): value for name, value in handler.headers.items()}, body))
        self.answers[min(len(self.requests), len(self.answers)) - 1](handler)


def status(code: int, body: bytes = b"", **headers: str) -> Answer:
    """Answer with this status; underscores in header names become dashes."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def listening(receiver: Receiver) -> Iterator[Receiver]:
    """Serve on a free port of 127.0.0.1 while the block runs."""

    class Posted(Handler):
        def do_POST(self) -> None:
            receiver.handle(self)

    with served(Posted) as url:
        receiver.url = f"{url}/hook"
        yield receiver
