"""`countersign lmcv prompts`: writes prompts of ten kinds, in buckets of length as the declared tokenizer counts.

The same seed, buckets and tokenizer give the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import orjson
from tokenizers import Tokenizer

from benchmarks.lmcv.files import Appender, PipelineError, Row
from benchmarks.lmcv.texts import CATEGORIES, parts

BUCKETS = (32, 128, 512, 2048, 8192, 16384)
PER_BUCKET = 50
LONGEST = 1.25
"""Times the wanted length above which a prompt is cut."""
GENERATOR = "countersign-lmcv-prompts-1"

Spans = Callable[[str], Sequence[tuple[int, int]]]
"""A text's tokens as the characters they stand for. Cutting by them, unlike decoding ids, never changes a letter."""


def main(argv: Sequence[str]) -> int:
    """Write the prompts; returns 0. Raises PipelineError."""
    arguments = _parser().parse_args(list(argv))
    tokenizer = open_tokenizer(arguments.tokenizer)
    output = Appender(arguments.output, resume=False)
    counts: dict[int, int] = {}
    try:
        for bucket in arguments.buckets:
            for index in range(arguments.per_bucket):
                row = prompt(bucket, index, arguments.seed, token_spans(tokenizer), name=arguments.tokenizer.name)
                counts[bucket] = counts.get(bucket, 0) + 1
                output.write(row)
    finally:
        output.close()
    print(f"wrote {sum(counts.values())} prompts in {len(counts)} buckets to {arguments.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign lmcv prompts", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="PATH", help="tokenizer.json, or its folder")
    parser.add_argument("--output", type=Path, default=Path("data/prompts.jsonl"), metavar="FILE")
    parser.add_argument("--buckets", type=_buckets, default=BUCKETS, metavar="N,N,…", help="lengths in tokens")
    parser.add_argument("--per-bucket", type=int, default=PER_BUCKET, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _buckets(text: str) -> tuple[int, ...]:
    items = text.split(",")
    if not all(item.strip().isdigit() and int(item) > 0 for item in items):
        raise argparse.ArgumentTypeError("lengths in tokens, separated by commas")
    return tuple(dict.fromkeys(map(int, items)))


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json` or a folder with one. Raises PipelineError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for a missing file and for broken JSON alike
        raise PipelineError(f"{file}: no tokenizer ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_spans(tokenizer: Tokenizer) -> Spans:
    """Tokens of a text, special ones added as the tokenizer's own configuration says and vLLM does."""
    return lambda text: tokenizer.encode(text).offsets


def prompt(bucket: int, index: int, seed: int, spans: Spans, *, name: str) -> Row:
    """One row of `prompts.jsonl`, as near to `bucket` tokens as whole fillers allow and never above 1.25 times."""
    category = CATEGORIES[(index + bucket) % len(CATEGORIES)]
    text = _text(category, bucket, Random(f"{seed}:{bucket}:{index}"), spans)
    count = len(spans(text))
    key = {"bucket": bucket, "category": category, "index": index, "input_text": text}
    return {
        "sample_id": hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)).hexdigest()[:20],
        "input_text": text,
        "canonical_output_text": "",
        "category": category,
        "target_input_tokens": bucket,
        "anchor_variant": None,
        "decode_config": None,
        "tokenizations": {name: {"token_count": count}},
        "metadata": {
            "generator": GENERATOR,
            "bucket_input_tokens": bucket,
            "actual_input_tokens": count,
            "bucket_index": index,
        },
    }


def _text(category: str, bucket: int, random: Random, spans: Spans) -> str:
    head, filler, tail = parts(category, random)
    room = bucket - len(spans(head + tail))
    middle, held = [], 0
    while held < room:
        piece = filler(random)
        middle.append(piece)
        held += max(1, len(spans(piece)))
    # Pieces counted one by one come out a little long or short, so the whole is counted before it is believed.
    while middle and len(spans(head + "".join(middle) + tail)) > bucket:
        middle.pop()
    while len(spans(head + "".join(middle) + tail)) < bucket:
        middle.append(filler(random))
    text = head + "".join(middle) + tail
    return text if len(spans(text)) <= bucket * LONGEST else _cut(head, "".join(middle), tail, bucket, spans)


def _cut(head: str, middle: str, tail: str, bucket: int, spans: Spans) -> str:
    """Cut to length: filler first, so that the question stays; then, if there is no other way, the question's start."""
    ends = [0, *(end for _, end in spans(middle))]
    for end in reversed(ends):
        text = head + middle[:end] + tail
        if len(spans(text)) <= bucket:
            return text
    whole = head + tail
    starts = [start for start, _ in spans(whole)]
    for start in starts[max(0, len(starts) - bucket) :]:
        if len(spans(whole[start:])) <= bucket:
            return whole[start:]
    return whole[starts[-1] :]
