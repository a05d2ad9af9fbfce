"""Names that pages put in backquotes, and where such a name exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from policies.settings import Settings
from tests.docs.pages import ROOT
from tests.helm import schema

ELSEWHERE = {
    "with_raw_response": "of the OpenAI SDK",
    "finish_reason": "of the OpenAI API",
    "iter_lines": "of httpx and requests",
    "--no-enable-chunked-prefill": "a flag of vLLM",
    "--max-num-batched-tokens": "a flag of vLLM",
    "--kv-cache-dtype": "a flag of vLLM",
    "--tool-strict-level": "a flag of vLLM",
    "--use-fp64-gumbel": "a flag of vLLM",
    "--enable-return-routed-experts": "a flag of vLLM",
    "--max-logprobs": "a flag of vLLM",
    "ssl_check_hostname": "of redis-py",
    "x-ratelimit-limit-requests": "a header of the OpenAI API",
    "traceparent": "a header of W3C Trace Context",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "a variable of OpenTelemetry's SDK",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "a variable of OpenTelemetry's SDK",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "a variable of OpenTelemetry's SDK",
    "OTEL_EXPORTER_OTLP_HEADERS": "a variable of OpenTelemetry's SDK",
    "OTEL_RESOURCE_ATTRIBUTES": "a variable of OpenTelemetry's SDK",
    "webhook-id": "a header of Standard Webhooks",
    "countersign-replay2-MODEL": "put together by verifier_pool.replays.queue_of",
    "error_type": "error.type of OpenTelemetry, as Prometheus spells it",
    "process_start_time_seconds": "of Prometheus' own client",
}
"""Names that are not ours, or are nowhere written out."""
_PRODUCT = ("countersign", "policies", "proxy", "verifier_pool", "benchmarks", "helm")
_SUFFIXES = {".py", ".yaml", ".tpl", ".json", ".txt"}
_TOP = ("Dockerfile", "Makefile", "compose.yaml", "pyproject.toml")


@cache
def source() -> str:
    """Everything that is shipped, as one text, but for what benchmarks wrote."""
    files = [ROOT / name for name in _TOP]
    for folder in _PRODUCT:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in _SUFFIXES]
    return "\n".join(
        path.read_text(encoding="utf-8", errors="replace") for path in files if "results" not in path.parts
    )


@cache
def _instruments() -> set[str]:
    found = re.findall(r"(?<![\w.])(?:countersign|gen_ai)[._][a-z0-9_.]+[a-z0-9]", source())
    return {name.replace(".", "_") for name in found}


@cache
def forms() -> tuple[dict[str, Any], dict[str, Any]]:
    """JSON schemas of the settings and of the chart's values."""
    return Settings.model_json_schema(), schema.build()


def is_setting(path: str) -> bool:
    """Whether a dotted path leads to a setting or a value. `X`, `NAME`, `N` and numbers stand for any key or place."""
    return any(_leads(form, path.split("."), form.get("$defs", {})) for form in forms())


def _leads(form: dict[str, Any], path: list[str], known: dict[str, Any]) -> bool:
    if "$ref" in form:
        return _leads(known[form["$ref"].rpartition("/")[2]], path, known)
    for branch in (*form.get("anyOf", ()), *form.get("allOf", ())):
        if _leads(branch, path, known):
            return True
    if not path:
        return True
    head, rest = path[0].removesuffix("[]"), path[1:]
    if head in form.get("properties", {}):
        return _leads(form["properties"][head], rest, known)
    inner = form.get("additionalProperties") or form.get("items")
    if isinstance(inner, dict):
        # `backends.url` is said of any backend; `models.NAME.url` of any model.
        any_key = bool(re.fullmatch(r"[A-Z][A-Z_]*|\d+|\*|[a-z][a-z-]*", head)) and "additionalProperties" in form
        if any_key or re.fullmatch(r"[A-Z][A-Z_]*|\d+|\*", head):
            return _leads(inner, rest, known)
        return "items" in form and _leads(inner, path, known)
    return inner is True


def is_variable(name: str) -> bool:
    """Whether an environment variable overrides a setting."""
    return name == "COUNTERSIGN_CONFIG" or is_setting(name.removeprefix("COUNTERSIGN_").lower().replace("__", "."))


def is_metric(name: str) -> bool:
    """Whether an instrument of that name is made, whatever Prometheus appends to it."""
    made = _instruments()
    ends = r"_(?:total|bucket|sum|count|seconds|bytes|ratio)$"
    while True:
        if name in made:
            return True
        shorter = re.sub(ends, "", name)
        if shorter == name:
            return False
        name = shorter


def is_path(name: str, page: str) -> bool:
    """Whether it is a file or folder, from the root or from the page."""
    plain = name.strip("/").removeprefix("./")
    return bool(plain) and ((ROOT / plain).exists() or (ROOT / Path(page).parent / plain).exists())


def is_in_source(name: str) -> bool:
    """Whether what is shipped says it, as a whole word."""
    text, at = source(), -1
    while (at := text.find(name, at + 1)) >= 0:
        before, after = text[at - 1 : at], text[at + len(name) : at + len(name) + 1]
        if not (_in_word(before) or _in_word(after)):
            return True
    return False


def _in_word(character: str) -> bool:
    return character.isalnum() or character in ("_", "-")


def exists(name: str, page: str) -> bool:
    """Whether a name of ours exists anywhere."""
    if name in ELSEWHERE:
        return True
    if not name.startswith("COUNTERSIGN_"):
        name = re.sub(r"[-_.]+[A-Z]{2,}\d*$", "", name)  # places to fill in
    if is_path(name, page) or is_setting(name) or is_metric(name):
        return True
    if name.startswith("COUNTERSIGN_"):
        return is_variable(name) or is_in_source(name)
    return is_in_source(name) or (is_in_source(name.rpartition(".")[2]) and _module(name))


def _module(name: str) -> bool:
    """Whether a dotted name is a module of ours, or something in one."""
    folder = name.split(".")
    for count in (len(folder), len(folder) - 1):
        path = ROOT.joinpath(*folder[:count])
        if path.with_suffix(".py").is_file() or path.is_dir():
            return True
    return False
