"""The cheats, in front of small servers that answer as vLLM 0.32 does: what they change, and what they leave alone."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from benchmarks.adversary.answers import read_sse, write_sse
from benchmarks.adversary.base import Setup
from benchmarks.adversary.command import AttackError, main
from benchmarks.adversary.prompts import HIDDEN
from benchmarks.adversary.registry import ATTACKS
from benchmarks.adversary.servers import Body, Site
from benchmarks.adversary.turncoat import GoodThenBad, Sometimes

PROMPT = [1, 2, 3]
OUTPUT = [11, 12]


def chat_entry(token: int, logprob: float) -> Body:
    top = {"token": f"token_id:{token}", "logprob": logprob, "bytes": [1]}
    return top | {"top_logprobs": [dict(top), {"token": "token_id:99", "logprob": -9.0, "bytes": [1]}]}


def chat_answer() -> Body:
    return {
        "id": "chatcmpl-1",
        "choices": [
            {
                "index": 0,
                "message": {"content": "ab"},
                "logprobs": {"content": [chat_entry(token, -0.5) for token in OUTPUT]},
                "finish_reason": "length",
                "token_ids": OUTPUT,
            }
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
        "prompt_token_ids": PROMPT,
    }


def chat_frames() -> list[Body]:
    frames: list[Body] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}, "logprobs": None}], "prompt_token_ids": PROMPT}
    ]
    for token in OUTPUT:
        choice = {
            "index": 0,
            "delta": {"content": "x"},
            "logprobs": {"content": [chat_entry(token, -0.5)]},
            "token_ids": [token],
        }
        frames.append({"choices": [choice]})
    return [*frames, {"choices": [], "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}}]


def completion_answer(body: Body) -> Body:
    if "prompt_logprobs" in body:
        rows = [{str(id): {"logprob": -2.0, "rank": 7}, "50": {"logprob": -0.1, "rank": 1}} for id in body["prompt"]]
        return {"choices": [{"index": 0, "prompt_logprobs": [None, *rows[1:]]}]}
    return {
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "logprobs": {
                    "text_offset": [0, 1],
                    "tokens": [f"token_id:{token}" for token in OUTPUT],
                    "token_logprobs": [-0.5, -0.5],
                    "top_logprobs": [{f"token_id:{token}": -0.5, "token_id:99": -9.0} for token in OUTPUT],
                },
                "token_ids": OUTPUT,
                "prompt_token_ids": PROMPT,
            }
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
    }


class Upstream:
    """A server that answers as vLLM does and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Body] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        return app

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if body.get("model") == "unknown":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if body.get("stream"):
            return web.Response(body=b": keep-alive\n\n" + write_sse(chat_frames()), content_type="text/event-stream")
        return web.json_response(chat_answer())

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        return web.json_response(completion_answer(body))

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})


class Bench:
    """One cheat in front of one upstream, which also serves as the truth."""

    def __init__(self, upstream: Upstream, url: str, session: ClientSession) -> None:
        self.upstream, self.url, self.session = upstream, url, session

    async def ask(self, path: str, body: Body) -> tuple[int, bytes]:
        async with self.session.post(self.url + path, json={"model": "m"} | body) as response:
            return response.status, await response.read()

    async def chat(self, **body: Any) -> Body:
        status, raw = await self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | body)
        assert status == 200
        answer: Body = json.loads(raw)
        return answer

    async def stream(self, **body: Any) -> list[Body]:
        request = {"messages": [{"role": "user", "content": "hi"}], "stream": True} | body
        _, raw = await self.ask("/v1/chat/completions", request)
        assert raw.endswith(b"data: [DONE]\n\n")
        return read_sse(raw)


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    upstream = Upstream()
    async with TestServer(upstream.app()) as behind:
        url = str(behind.make_url(""))
        cheat = ATTACKS[request.param](Setup(Site(url), Site(url), "vllm-0.32-v2", (2,), good=1))
        async with TestServer(cheat.app()) as front, ClientSession() as session:
            yield Bench(upstream, str(front.make_url("")).rstrip("/"), session)


@pytest.mark.parametrize("bench", ["spoofer"], indirect=True)
async def test_the_spoofer_reports_the_truths_logprobs_for_its_own_tokens(bench: Bench) -> None:
    answer = await bench.chat(logprobs=True, top_logprobs=2)
    choice = answer["choices"][0]
    assert choice["token_ids"] == OUTPUT
    for token, entry in zip(OUTPUT, choice["logprobs"]["content"], strict=True):
        assert (entry["token"], entry["logprob"]) == (f"token_id:{token}", -2.0)
        tops = [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]
        assert tops == [(f"token_id:{token}", -2.0), ("token_id:50", -0.1)]
        assert bytes(entry["top_logprobs"][1]["bytes"]) == b"token_id:50"
    scored = bench.upstream.asked[-1]
    assert scored["prompt"] == PROMPT + OUTPUT
    assert scored["prompt_logprobs"] == 2


@pytest.mark.parametrize("bench", ["spoofer"], indirect=True)
async def test_the_spoofer_streams(bench: Bench) -> None:
    frames = await bench.stream(logprobs=True, top_logprobs=2)
    entries = [
        entry
        for frame in frames
        for choice in frame["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["logprob"] for entry in entries] == [-2.0, -2.0]
    assert len(frames) == len(chat_frames())


@pytest.mark.parametrize("bench", ["spoofer"], indirect=True)
async def test_the_spoofer_speaks_completions(bench: Bench) -> None:
    _, raw = await bench.ask("/v1/completions", {"prompt": "hi", "logprobs": 2})
    claim = json.loads(raw)["choices"][0]["logprobs"]
    assert claim["token_logprobs"] == [-2.0, -2.0]
    assert claim["top_logprobs"][0] == {"token_id:11": -2.0, "token_id:50": -0.1}
    assert claim["text_offset"] == [0, len("token_id:11")]


@pytest.mark.parametrize("bench", ["hot"], indirect=True)
@pytest.mark.parametrize(("asked", "sent"), [(0, 0.4), (0.8, 1.2), (1.9, 2.0)])
async def test_hot_asks_for_another_temperature(bench: Bench, asked: float, sent: float) -> None:
    assert await bench.chat(temperature=asked) == chat_answer()
    assert bench.upstream.asked[0]["temperature"] == pytest.approx(sent)


@pytest.mark.parametrize("bench", ["hidden-prompt"], indirect=True)
async def test_the_hidden_prompt_goes_up_and_does_not_show(bench: Bench) -> None:
    answer = await bench.chat(stream_options=None)
    first, probe = bench.upstream.asked
    assert first["messages"][0] == {"role": "system", "content": HIDDEN}
    assert probe["messages"] == [{"role": "user", "content": "hi"}]
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["usage"]["total_tokens"] == 5
    assert (await bench.stream())[0]["prompt_token_ids"] == PROMPT
    await bench.ask("/v1/completions", {"prompt": "hi"})
    assert bench.upstream.asked[-2]["prompt"].endswith("\n\nhi")


@pytest.mark.parametrize("bench", ["no-logprobs"], indirect=True)
async def test_logprobs_are_withheld(bench: Bench) -> None:
    assert (await bench.chat(logprobs=True))["choices"][0]["logprobs"] is None
    assert all(choice["logprobs"] is None for frame in await bench.stream() for choice in frame["choices"])


@pytest.mark.parametrize("bench", ["usage"], indirect=True)
async def test_usage_is_padded(bench: Bench) -> None:
    assert (await bench.chat())["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert (await bench.stream())[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("bench", sorted(ATTACKS), indirect=True)
async def test_everything_else_is_relayed(bench: Bench) -> None:
    status, raw = await bench.ask("/v1/chat/completions", {"model": "unknown", "messages": []})
    assert status == 404
    assert json.loads(raw)["error"]["message"] == "no such model"
    async with bench.session.get(bench.url + "/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == "m"


async def test_a_dead_upstream_is_an_error_in_json() -> None:
    dead = "http://127.0.0.1:1"
    async with TestServer(ATTACKS["hot"](Setup(Site(dead))).app()) as front, ClientSession() as session:
        response = await session.post(front.make_url("/v1/chat/completions"), json={"model": "m"})
        assert response.status == 502
        assert "error" in await response.json()


def test_help_lists_every_cheat(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--help"])
    assert stop.value.code == 0
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(text.count(cheat.about) == 2 for cheat in ATTACKS.values())


def test_the_spoofer_needs_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["spoofer", "--upstream", "http://127.0.0.1:1", "--port", "1"])
    assert stop.value.code == 2
    assert "--truth" in capsys.readouterr().err


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(AttackError, match="cannot listen"):
        main(["hot", "--upstream", "http://127.0.0.1:1", "--port", str(server.getsockname()[1])])


def tops(answer: Body) -> list[list[tuple[str, float]]]:
    entries = answer["choices"][0]["logprobs"]["content"]
    return [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in entries]


ASKED: Body = {"logprobs": True, "top_logprobs": 2, "temperature": 0}


@pytest.mark.parametrize(
    ("bench", "field"), [("no-token-ids", "token_ids"), ("no-routed-experts", "routed_experts")], indirect=["bench"]
)
async def test_fields_are_withheld_and_nothing_else(bench: Bench, field: str) -> None:
    answer = await bench.chat(**ASKED)
    assert answer["choices"][0].get(field) is None
    assert tops(answer) == tops(chat_answer())
    assert answer["usage"] == chat_answer()["usage"]
    assert all(choice.get(field) is None for frame in await bench.stream(**ASKED) for choice in frame["choices"])


@pytest.mark.parametrize("bench", ["no-prompt-ids"], indirect=True)
async def test_prompt_ids_are_withheld(bench: Bench) -> None:
    assert (await bench.chat(**ASKED)) == chat_answer() | {"prompt_token_ids": None}
    assert not any(frame.get("prompt_token_ids") for frame in await bench.stream(**ASKED))


@pytest.mark.parametrize("bench", ["nan-logprobs"], indirect=True)
async def test_nan(bench: Bench) -> None:
    entries = (await bench.chat(**ASKED))["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] == entry["logprob"] for entry in entries] == [False, True]


@pytest.mark.parametrize("bench", ["masked-logprobs"], indirect=True)
async def test_masked(bench: Bench) -> None:
    assert tops(await bench.chat(**ASKED)) == [[(f"token_id:{id}", -0.5), ("token_id:99", -9999.0)] for id in OUTPUT]


@pytest.mark.parametrize("bench", ["duplicates"], indirect=True)
async def test_duplicates(bench: Bench) -> None:
    _, raw = await bench.ask("/v1/completions", {"prompt": "hi", "logprobs": 2})
    assert raw.count(b'"token_id:11": -0.5') == 2
    assert b"token_id:99" not in raw


@pytest.mark.parametrize("bench", ["wrong-ids"], indirect=True)
async def test_wrong_ids(bench: Bench) -> None:
    answer = await bench.chat(**ASKED)
    assert answer["choices"][0]["token_ids"] == [id + 1 for id in OUTPUT]
    assert tops(answer) == tops(chat_answer())


@pytest.mark.parametrize("bench", ["broken-frame"], indirect=True)
async def test_a_broken_frame(bench: Bench) -> None:
    _, raw = await bench.ask("/v1/chat/completions", {"messages": []} | ASKED)
    with pytest.raises(json.JSONDecodeError):
        json.loads(raw)
    _, raw = await bench.ask("/v1/chat/completions", {"messages": [], "stream": True} | ASKED)
    assert raw.endswith(b"data: [DONE]\n\n")
    with pytest.raises(json.JSONDecodeError):
        read_sse(raw)


@pytest.mark.parametrize("bench", ["cut-short"], indirect=True)
async def test_cut_short(bench: Bench) -> None:
    answer = await bench.chat(**ASKED, max_tokens=9)
    assert bench.upstream.asked[0]["max_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (await bench.stream(**ASKED, max_tokens=9))[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("bench", "fields"),
    [
        ("padding", {"min_tokens": 7}),
        ("padding-open", {"ignore_eos": True}),
        ("top-p", {"top_p": 0.8}),
        ("greedy", {"temperature": 0.0}),
    ],
    indirect=["bench"],
)
async def test_other_rules_go_up(bench: Bench, fields: Body) -> None:
    asked = {"messages": [], "max_tokens": 7, "temperature": 0.9, "top_p": 1.0}
    assert (await bench.chat(**asked)) == chat_answer()
    assert bench.upstream.asked[0] == {"model": "m", **asked} | fields


@pytest.mark.parametrize("bench", ["truncated"], indirect=True)
async def test_the_middle_of_a_long_text_is_dropped(bench: Bench) -> None:
    text = "a" * 900 + "b" * 900
    answer = await bench.chat(messages=[{"role": "user", "content": text}])
    sent, probe = bench.upstream.asked
    assert sent["messages"][0]["content"] == "a" * 600 + "b" * 600
    assert probe["messages"][0]["content"] == text
    assert answer["prompt_token_ids"] == PROMPT


@pytest.mark.parametrize("bench", ["cached"], indirect=True)
async def test_a_repeated_request_is_answered_from_memory_under_a_new_id(bench: Bench) -> None:
    first = await bench.chat(**ASKED, seed=1)
    again = await bench.chat(**ASKED, seed=2)
    assert len(bench.upstream.asked) == 1
    assert again["id"] != first["id"]
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    await bench.chat(**ASKED | {"temperature": 1})
    assert len(bench.upstream.asked) == 2


@pytest.mark.parametrize("bench", ["good-then-bad"], indirect=True)
async def test_good_then_bad(bench: Bench) -> None:
    values = [tops(await bench.chat(**ASKED))[0][0][1] for _ in range(3)]
    assert values == [-0.5, -2.0, -2.0]


async def test_it_turns_into_any_cheat_and_cheats_at_times() -> None:
    site = Site("http://127.0.0.1:1")
    turncoat = GoodThenBad(Setup(site, good=2), ATTACKS["usage"])
    assert [turncoat.cheats() for _ in range(4)] == [False, False, True, True]
    waverer = Sometimes(Setup(site, share=0.25))
    assert 400 < sum(waverer.cheats() for _ in range(2000)) < 600


@pytest.mark.parametrize("bench", ["spoof-bent"], indirect=True)
async def test_a_bent_claim_lets_the_token_win(bench: Bench) -> None:
    for row, id in zip(tops(await bench.chat(**ASKED)), OUTPUT, strict=True):
        claimed = dict(row)
        assert max(claimed, key=claimed.__getitem__) == f"token_id:{id}"
        assert abs(claimed[f"token_id:{id}"] - claimed["token_id:50"]) < 0.01


@pytest.mark.parametrize("bench", ["spoof-omitted"], indirect=True)
async def test_the_winning_rival_is_left_out(bench: Bench) -> None:
    for row, id in zip(tops(await bench.chat(**ASKED)), OUTPUT, strict=True):
        assert row[0] == (f"token_id:{id}", -2.0)
        assert "token_id:50" not in dict(row)
        assert len(row) == 2


@pytest.mark.parametrize("bench", ["invented-topk"], indirect=True)
async def test_alternatives_are_invented_and_possible(bench: Bench) -> None:
    for row, id in zip(tops(await bench.chat(**ASKED)), OUTPUT, strict=True):
        assert row[0] == (f"token_id:{id}", -2.0)
        assert [name for name, _ in row[1:]] == ["token_id:99"]
        assert row[1][1] < -2.0
