"""LMCV's pipeline against a real vLLM: collected evidence replays close to itself, a moved claim does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lmcv.command import main
from benchmarks.lmcv.files import read_csv, read_jsonl

pytestmark = pytest.mark.e2e


def test_a_server_agrees_with_its_own_evidence(vllm_server: str, model_dir: Path, tmp_path: Path) -> None:
    prompts, evidence, folder = tmp_path / "prompts.jsonl", tmp_path / "evidence.jsonl", tmp_path / "out"
    assert (
        main(
            ["prompts", "--tokenizer", str(model_dir), "--buckets", "32", "--per-bucket", "2", "--output", str(prompts)]
        )
        == 0
    )
    options = ["--url", vllm_server, "--model", "smollm2"]
    assert (
        main(["collect", "--input", str(prompts), "--output", str(evidence), "--max-new-tokens", "24", *options]) == 0
    )
    assert main(["verify", "--evidence", str(evidence), "--output-dir", str(folder), *options]) == 0
    rows = read_jsonl(evidence)
    assert [row["metadata"]["actual_input_tokens"] for row in read_jsonl(prompts)] == [
        len(r["input_ids"]) for r in rows
    ]
    records = read_csv(folder / "worker_vs_verifier_depth_metrics.csv")
    assert len(records) == sum(len(row["output_ids"]) for row in rows)
    # K or K + 1 listed on both sides.
    sizes = {int(record["common_top_count"]) + int(record["missing_from_verifier_count"]) for record in records}
    assert sizes <= {20, 21}
    assert main(["summarise", "--metrics", str(folder)]) == 0
    result = json.loads((folder / "dense_verification.json").read_bytes())
    assert result["overall"]["missing_compared_count"] == 0
    assert result["overall"]["mean_abs_logprob_diff"] < 0.1
    assert {row["registered_k"] for row in read_csv(folder / "legality.csv")} == {"1"}

    # Every claimed logprob moved by half a nat, as a liar without the model might have it.
    for row in rows:
        for step in row["worker_trace"]:
            step["selected_logprob"] -= 0.5
            step["top_logprobs"] = [dict(top, logprob=top["logprob"] - 0.5) for top in step["top_logprobs"]]
    evidence.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["verify", "--evidence", str(evidence), "--output-dir", str(folder), *options]) == 0
    command = ["summarise", "--metrics", str(folder), "--policy", "qwen3-8b-bf16-report", "--fail-on-reject"]
    assert main(command) == 1
