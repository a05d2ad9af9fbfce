"""The offline pipeline against a small server that answers as vLLM's completions do, and on published rows."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.lmcv import collect, prompts, routes, summarise, verify
from benchmarks.lmcv.client import RequestFailed
from benchmarks.lmcv.command import main
from benchmarks.lmcv.evidence import read_sample, trace
from benchmarks.lmcv.files import Appender, PipelineError, latest, read_csv, read_jsonl
from policies.lmcv import CSV_COLUMNS, POLICIES, verdict

DATA = Path(__file__).parents[1] / "data"
TOKENIZER = DATA / "tokenizers" / "smollm2.json"
LENGTH = 6


def value(token: int, shift: float) -> float:
    return -0.1 - 0.7 * token - shift


class Vllm:
    """Always answers 0, 1, 2, …; listed ids are 0…k−1 with fixed logprobs. `shift` moves the replay's."""

    def __init__(self) -> None:
        self.shift = 0.0
        self.broken: set[str] = set()
        self.asked: list[dict[str, Any]] = []
        self.routes = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_post("/v1/completions", self.completions)
        async with TestServer(app) as server:
            yield str(server.make_url("/")).rstrip("/")

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if str(body["prompt"]) in self.broken:
            return web.json_response({"error": {"message": "no"}}, status=400)
        choice = self.replay(body) if "prompt_logprobs" in body else self.answer(body)
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 3}})

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = list(range(LENGTH))
        tops = [
            {f"token_id:{token}": value(token, 0)} | {f"token_id:{id}": value(id, 0) for id in range(body["logprobs"])}
            for token in ids
        ]
        choice = {"text": "abc", "token_ids": ids, "prompt_token_ids": [7, 8, 9], "finish_reason": "length"}
        if self.routes:
            choice["routed_experts"] = npy(np.zeros((3 + LENGTH - 1, 2, 4), np.uint8))
        return choice | {"logprobs": {"top_logprobs": tops}}

    def replay(self, body: dict[str, Any]) -> dict[str, Any]:
        rows: list[Any] = [None]
        for token in body["prompt"][1:]:
            listed = dict.fromkeys([token, *range(body["prompt_logprobs"])])
            rows.append(
                {
                    str(id): {"logprob": value(id, self.shift), "rank": id + 1, "decoded_token": f"<{id}>\n"}
                    for id in listed
                }
            )
        choice = {"prompt_token_ids": body["prompt"], "token_ids": [0], "prompt_logprobs": rows}
        if self.routes:
            experts = np.zeros((len(body["prompt"]) - body["routed_experts_prompt_start"], 2, 4), np.uint8)
            experts[0, 0, 0] = 5
            choice["routed_experts"] = npy(experts)
        return choice


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"sample_id": f"s{index}", "input_text": f"text {index}", "category": "chat"} for index in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def run(step: Any, *arguments: object) -> int:
    """A step with a loop of its own, in a thread, while the server runs in this one."""
    return int(await asyncio.to_thread(step.main, [str(argument) for argument in arguments]))


async def test_from_prompts_to_a_verdict(tmp_path: Path, prompt_file: Path) -> None:
    evidence, folder = tmp_path / "evidence.jsonl", tmp_path / "out"
    server = Vllm()
    async with server.running() as url:
        assert await run(collect, "--input", prompt_file, "--output", evidence, "--url", url, "--k", 4) == 0
        server.shift = 0.01
        assert await run(verify, "--evidence", evidence, "--output-dir", folder, "--url", url) == 0
    replays = [body for body in server.asked if "prompt_logprobs" in body]
    assert {body["prompt_logprobs"] for body in replays} == {4}
    assert {tuple(body["prompt"]) for body in replays} == {(7, 8, 9, 0, 1, 2, 3, 4, 5)}
    records = read_csv(folder / verify.METRICS)
    assert tuple(records[0]) == CSV_COLUMNS
    assert len(records) == 5 * LENGTH
    assert records[0]["target_decoded_token"] == "<0>\n"
    assert [float(record["abs_logprob_diff"]) for record in records] == pytest.approx([0.01] * 30)
    # Depth 5 is outside the top 4: the worker's rank is only known to be past it, so the difference is unknown.
    depth = {record["depth"]: record for record in records}
    assert (depth["3"]["worker_selected_rank"], depth["3"]["rank_delta_verifier_minus_worker"]) == ("4", "0")
    assert (depth["2"]["worker_selected_rank"], depth["2"]["rank_delta_verifier_minus_worker"]) == ("3", "0")
    assert (depth["5"]["union_top_count"], depth["5"]["rank_delta_verifier_minus_worker"]) == ("5", "")
    legality = read_csv(folder / "legality.csv")
    assert {(row["registered_k"], row["legal_count"], row["dense"]) for row in legality} == {("1", "1", "reject")}
    assert await run(summarise, "--metrics", folder, "--policy", "qwen3-8b-bf16-report") == 0
    result = json.loads((folder / "dense_verification.json").read_bytes())
    assert result["sample_verdict_counts"] == {"PASS": 5, "REJECT": 0, "INCONCLUSIVE": 0}
    assert (result["policy_k"], result["k"]) == (32, 4)
    assert result["notes"][0].startswith("k_differs")
    assert (folder / "summary.md").read_text().count("\n| s") == 1 + 30
    by_depth = read_csv(folder / "distribution" / "by_output_depth_bucket.csv")
    assert [(row["group"], row["count"]) for row in by_depth] == [("000-016", "30")]


async def test_failures_stay_as_rows_and_resuming_asks_only_for_them(tmp_path: Path, prompt_file: Path) -> None:
    evidence, folder = tmp_path / "evidence.jsonl", tmp_path / "out"
    server = Vllm()
    server.broken = {"text 2"}
    async with server.running() as url:
        options = ("--input", prompt_file, "--output", evidence, "--url", url)
        assert await run(collect, *options) == 1
        assert latest(read_jsonl(evidence))["s2"]["error"]["reason"] == "refused"
        assert await run(verify, "--evidence", evidence, "--output-dir", folder, "--url", url) == 1
        await run(summarise, "--metrics", folder)
        decisions = {row["group"]: row for row in read_csv(folder / "sample_decisions.csv")}
        assert len(decisions) == 5
        assert (decisions["s2"]["verdict"], decisions["s2"]["count"]) == ("INCONCLUSIVE", "0")

        # A crash in the middle of a line, then another try.
        with evidence.open("ab") as file:
            file.write(b'{"sample_id": "s4", "inp')
        server.broken, before = set(), len(server.asked)
        assert await run(collect, *options, "--resume") == 0
        assert [body["prompt"] for body in server.asked[before:]] == ["text 2"]
        with pytest.raises(PipelineError, match="temperature"):
            await run(collect, *options, "--resume", "--temperature", "0.5")

        # Two samples are in the table in full, a third was cut off.
        kept = (folder / verify.METRICS).read_text().split("s2")[0]
        (folder / verify.METRICS).write_text(kept[: kept.index("s3") + 40] if "s3" in kept else kept[:-40])
        done = len(read_csv(folder / verify.METRICS)) // LENGTH
        before = len(server.asked)
        assert await run(verify, "--evidence", evidence, "--output-dir", folder, "--url", url, "--resume") == 0
        assert len(server.asked) - before == 5 - done
        assert len(read_csv(folder / verify.METRICS)) == 5 * LENGTH
        assert read_jsonl(folder / "errors.jsonl") == []


async def test_expert_ids_are_kept_and_compared(tmp_path: Path, prompt_file: Path) -> None:
    evidence, folder = tmp_path / "evidence.jsonl", tmp_path / "out"
    server = Vllm()
    server.routes = True
    async with server.running() as url:
        await run(collect, "--input", prompt_file, "--output", evidence, "--url", url, "--routes")
        await run(verify, "--evidence", evidence, "--output-dir", folder, "--url", url, "--routes")
    assert read_jsonl(evidence)[0]["routed_experts_summary"]["shape"] == [8, 2, 4]
    row = read_csv(folder / "route_diff_by_sample.csv")[0]
    assert (row["status"], row["compared_tokens"], row["compared_entries"]) == ("ok", "5", "20")
    assert (row["entry_mismatch_count"], row["entry_mismatch_rate"]) == ("1", "0.05")
    found = json.loads((folder / "route_diff_summary.json").read_bytes())
    assert found["fp8"]["decision"] == "insufficient_tokens"


def test_expert_ids_in_every_form() -> None:
    array = np.arange(24).reshape(3, 2, 4)
    for form in (npy(array), array.tolist(), {"data": npy(array)}, {"routed_experts": array.tolist()}):
        found = routes.decode(form)
        assert found is not None
        assert found.tolist() == array.tolist()
    assert routes.decode([1, 2])[:, 0, 0].tolist() == [1, 2]  # type: ignore[index]
    for nothing in (None, "", "!!", [], {"x": 1}, [[1], [2, 3]], npy(np.zeros((2, 2))), [0.5]):
        assert routes.decode(nothing) is None


async def test_nothing_to_compare_has_a_status(tmp_path: Path) -> None:
    row = {"sample_id": "a", "routed_experts": np.zeros((8, 2, 4), int).tolist()}
    options: dict[str, Any] = {"verifier_model": "m", "prompt": 3, "output": 6}
    assert routes.compare(row, None, **options)["status"] == "missing_routes"
    assert routes.compare(row, np.zeros((6, 2, 4), int).tolist(), **options)["status"] == "ok"
    assert routes.compare(row, np.zeros((9, 2, 4), int).tolist(), **options)["compared_tokens"] == 5
    # A reference of the pool leaves out the last token, which the worker has no row for either.
    assert routes.compare(row, np.zeros((5, 2, 4), int).tolist(), **options)["compared_tokens"] == 5
    assert routes.compare(row, np.zeros((7, 2, 4), int).tolist(), **options)["status"] == "empty_common_window"
    assert routes.compare(row, np.zeros((6, 2, 3), int).tolist(), **options)["shape_status"].startswith("layer")
    nothing = routes.compare(row, np.zeros((6, 2, 4), int).tolist(), layers=(9,), **options)
    assert nothing["status"] == "no_selected_layers"


def lmcv_row(**changes: Any) -> dict[str, Any]:
    """Evidence as LMCV's own offline collector writes it: engine ranks, decoded tokens."""
    steps = [
        {
            "depth": depth,
            "target_token_id": 40 + depth,
            "target_decoded_token": f"t{depth}",
            "selected_logprob": -0.5,
            "selected_rank": 1,
            "top_logprobs": [
                {"position": 0, "token_id": 40 + depth, "logprob": -0.5, "rank": 1, "decoded_token": "x"},
                {"position": 1, "token_id": 3, "logprob": -1.5, "rank": 2, "decoded_token": "y"},
            ],
        }
        for depth in range(4)
    ]
    row: dict[str, Any] = {"sample_id": "a", "input_ids": [1, 2], "output_ids": [40, 41, 42, 43]}
    return row | {"worker_trace_mode": "vllm_decode_generate", "worker_trace": steps} | changes


def test_lmcvs_own_evidence_is_read_with_its_ranks() -> None:
    sample = read_sample(lmcv_row())
    assert (sample.k, sample.counted_ranks, sample.faults) == (2, False, ())
    assert sample.worker.ranks.tolist() == [1, 1, 1, 1]
    assert sample.tokens == ("t0", "t1", "t2", "t3")


def test_a_trace_with_gaps_repeats_or_other_tokens_counts_as_missing() -> None:
    steps = lmcv_row()["worker_trace"]
    swapped = steps[3] | {"target_token_id": 9}
    sample = read_sample(lmcv_row(worker_trace=[steps[0], steps[1], steps[1], swapped, {"depth": 77}]))
    assert np.isnan(sample.worker.selected).tolist() == [False, True, True, True]
    assert any("two trace rows" in fault for fault in sample.faults)
    assert any("3 served tokens" in fault for fault in sample.faults)
    faulty: list[dict[str, Any]] = [
        {"output_ids": []},
        {"input_ids": None},
        {"output_ids": ["x"]},
        {"output_ids": [-1]},
    ]
    for broken in faulty:
        with pytest.raises(RequestFailed, match="bad_evidence"):
            read_sample(lmcv_row(**broken))
    assert np.isnan(read_sample(lmcv_row(worker_trace=None)).worker.selected).all()


def test_ranks_of_a_completion_are_counted_not_read_off_places() -> None:
    top = {"token_id:5": -3.0, "token_id:1": -1.0, "token_id:2": -1.0, "token_id:3": -9999.0}
    ids, steps = trace({"token_ids": [5], "logprobs": {"top_logprobs": [top]}})
    assert (ids, steps[0]["selected_rank"]) == ([5], 3)
    assert [entry["rank"] for entry in steps[0]["top_logprobs"]] == [1, 1, 3, 4]
    cases: list[tuple[dict[str, Any], str]] = [({}, "no_token_ids"), ({"token_ids": [5]}, "no_logprobs")]
    for broken, reason in cases:
        with pytest.raises(RequestFailed, match=reason):
            trace(broken)


def test_summaries_of_published_rows(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    shutil.copy(DATA / "lmcv" / "qwen3.6_35b_bf16_tokens.csv", source)
    assert main(["summarise", "--metrics", str(source), "--policy", "qwen3-8b-bf16-report"]) == 0
    result = json.loads((tmp_path / "dense_verification.json").read_bytes())
    assert (result["k"], result["notes"], result["sample_count"]) == (32, [], 4)
    assert result["overall"]["count"] == 53
    decisions = read_csv(tmp_path / "sample_decisions.csv")
    assert tuple(decisions[0]) == tuple(read_csv(DATA / "lmcv" / "qwen3_8b_bf16_sample_decisions.csv")[0])
    by_sample = read_csv(tmp_path / "distribution" / "by_sample.csv")
    for row in by_sample:
        metrics = {name: float(number) for name, number in row.items() if name != "group"}
        again = verdict(metrics, POLICIES["qwen3-8b-bf16-report"], k=32)
        assert again.verdict == next(each["verdict"] for each in decisions if each["group"] == row["group"])
    assert main(["summarise", "--metrics", str(source), "--calibrate"]) == 0
    found = json.loads((tmp_path / "recommended_thresholds.json").read_bytes())
    assert found["pass"]["mean_abs_logprob_diff"] * 3 == pytest.approx(found["reject"]["mean_abs_logprob_diff"])
    assert main(["summarise", "--metrics", str(source), "--challenger", str(source)]) == 0


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for text, words in (
        ("", "no rows"),
        ("a,b\n1,2\n", "no column"),
        (",".join(CSV_COLUMNS) + "\n" + "x," * 23, "x.csv"),
    ):
        path.write_text(text)
        with pytest.raises(PipelineError, match=words):
            summarise.read_metrics(path)
    with pytest.raises(PipelineError):
        summarise.read_metrics(tmp_path / "absent.csv")


def test_prompts_repeat_themselves_and_hit_their_length(tmp_path: Path) -> None:
    def write(name: str, *more: str) -> bytes:
        path = tmp_path / name
        options = ["--tokenizer", str(TOKENIZER), "--buckets", "32,128,512", "--per-bucket", "10"]
        assert main(["prompts", *options, "--output", str(path), *more]) == 0
        return path.read_bytes()

    first = write("a.jsonl")
    assert first == write("b.jsonl")
    assert first != write("c.jsonl", "--seed", "1")
    rows = [json.loads(line) for line in first.splitlines()]
    assert len({row["sample_id"] for row in rows}) == 30
    assert len({row["category"] for row in rows}) == 10
    spans = prompts.token_spans(prompts.open_tokenizer(TOKENIZER))
    for row in rows:
        count = len(spans(row["input_text"]))
        assert count == row["metadata"]["actual_input_tokens"]
        assert row["target_input_tokens"] * 0.9 <= count <= row["target_input_tokens"] * 1.25


def test_an_unknown_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert "no step" in capsys.readouterr().err
    assert main(["--help"]) == 0


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"sample_id": "a"}\n{"sam\n{"sample_id": "b"}\n')
    with pytest.raises(PipelineError, match="line 2"):
        read_jsonl(path)
    output = Appender(path, resume=False)
    output.write({"sample_id": "c"})
    output.close()
    assert [row["sample_id"] for row in read_jsonl(path)] == ["c"]
