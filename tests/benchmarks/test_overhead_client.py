"""The measuring client in closed and open loops, the counting of bytes, and the outside witness's command line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson
from tokenizers import Tokenizer

from benchmarks.demo.processes import free_ports
from benchmarks.overhead import witness
from benchmarks.overhead.answer import Script
from benchmarks.overhead.asking import Asking
from benchmarks.overhead.cells import Cell, mixes
from benchmarks.overhead.client import Target, closed_loop, open_loop
from benchmarks.overhead.forwarding import Forwarder
from benchmarks.overhead.upstream import Plan, precise_loop, serve
from tests.benchmarks.overhead_rows import step

TOKENS = 5
TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizers" / "smollm2.json"
T = TypeVar("T")


def target(port: int, tokens: int = TOKENS) -> Target:
    body = {"messages": [], "max_tokens": tokens, "stream": True}
    return Target("direct", f"http://127.0.0.1:{port}/v1/chat/completions", orjson.dumps(body), {})


def against_script(ask: Callable[[int], Coroutine[None, None, T]]) -> T:
    async def run() -> T:
        server = await serve(Plan(Script(TOKENS), 0.005, 0.001))
        try:
            return await ask(server.sockets[0].getsockname()[1])
        finally:
            server.close()

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(run())


def test_a_closed_loop_asks_one_after_the_other() -> None:
    found = against_script(lambda port: closed_loop([target(port, n) for n in (1, 2, 3, 4, 5)], 1, 20))
    assert [len(one.response.token_times) for one in found if one.response] == [1, 2, 3, 4, 5]
    for one, other in pairwise(found):
        assert one.response is not None
        assert one.response.finished <= other.due


def test_an_open_loop_asks_at_its_own_times() -> None:
    found = against_script(lambda port: open_loop([target(port)] * 3, [0.0, 0.001, 0.1], 20))
    assert [round(one.due - found[0].due, 6) for one in found] == [0.0, 0.001, 0.1]
    for one in found:
        assert one.response is not None
        assert one.response.token_times[0] - one.due >= 0.004


def test_an_answer_that_is_no_stream_ends_at_its_length() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nno")
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b"pe")
        await writer.drain()
        await reader.read()
        writer.close()

    async def run() -> list[str]:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        found = await closed_loop([target(port)], 1, 600)
        server.close()
        return [*(one.error for one in found), *(one.error for one in await closed_loop([target(port)], 1, 5))]

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        refused, gone = runner.run(run())
    assert refused == "status 400"
    assert gone.startswith("no connection")


def test_bytes_are_counted_both_ways_and_passed_on() -> None:
    async def counted(port: int) -> tuple[int, int, int]:
        async with Forwarder(f"http://127.0.0.1:{port}", free_ports(1)[0]) as forwarder:
            (one,) = await closed_loop([target(int(forwarder.url.rpartition(":")[2]))], 1, 20)
            assert one.response is not None
            assert one.response.text == Script(TOKENS).text(TOKENS)
            return forwarder.up, forwarder.down, len(target(port).request())

    up, down, sent = against_script(counted)
    assert up == sent
    assert down > 500


def test_the_witness_gets_the_same_load(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    cell = Cell("closed", 4, mixes("64/32"), 16)
    planned = witness.runs(["direct", "async"], 3, seed=1)
    assert len({run.key for run in planned}) == len(planned) == 12
    assert planned == witness.runs(["direct", "async"], 3, seed=1)
    run = witness.Run(1, witness.THEIRS, "async")
    words = witness.command(
        run,
        cell,
        url="http://p:1",
        endpoint="completions",
        model="m",
        tokenizer=Path("folder"),
        temperature=0.7,
        seed=1,
    )
    pairs = dict(pairwise(words))
    assert pairs["--base-url"] == "http://p:1"
    assert pairs["--num-prompts"] == "16"
    assert pairs["--max-concurrency"] == "4"
    assert (pairs["--random-input-len"], pairs["--random-output-len"]) == ("64", "32")
    assert pairs["--header"] == "x-countersign-mode=async"
    direct = witness.command(
        witness.Run(1, witness.THEIRS, "direct"),
        cell,
        url="u",
        endpoint="chat",
        model="m",
        tokenizer=tmp_path,
        temperature=0.0,
        seed=1,
    )
    assert "--header" not in direct
    chat = dict(pairwise(direct))
    assert chat["--backend"] == "openai-chat"
    targets = Asking("m").targets("direct", {"direct": "u"}, [cell.mix.longest] * 8, np.random.default_rng(5))
    ours = [orjson.loads(each.body)["messages"][0]["content"] for each in targets]
    counts = [len(Tokenizer.from_file(str(TOKENIZER)).encode(text)) for text in ours]
    assert min(counts) - 1 <= int(chat["--random-input-len"]) <= max(counts) + 1


def test_rows_of_both_tools_hold_the_same_figures() -> None:
    measured = step("async", 1, requests=3)
    measured["errors"][2] = "timeout"
    row = witness.row_of_ours(witness.Run(2, witness.OURS, "async"), measured)
    assert (row["round"], row["tool"], row["ttft_ms"]) == (2, "ours", [23.0, 23.01])
    assert row["error"] == "1 requests failed"
    result = {"ttfts": [0.5, 0.1], "itls": [[0.01, 0.03], []], "errors": ["", ""]}
    theirs = witness._theirs(witness.Run(1, witness.THEIRS, "direct"), result)
    assert (theirs["ttft_ms"], theirs["gap_mean_ms"], theirs["total_ms"]) == ([500.0], [20.0], [540.0])
    assert theirs["error"] == "1 requests failed"
    assert witness.done([row, theirs]) == set()
    assert witness.done([row | {"error": ""}]) == {(2, "ours", "async")}
