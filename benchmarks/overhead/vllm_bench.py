"""`vllm bench serve`, kept loaded: each line of standard input is its command line, as a JSON list.

Each line of standard output says when one is done (`ok`, or what went wrong). What it prints itself goes to standard
error. `python -m benchmarks.overhead.vllm_bench`; loading vLLM takes longer than a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys


def main() -> int:
    """Until standard input ends."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    print("ready", flush=True)
    for line in sys.stdin:
        said = "ok"
        with contextlib.redirect_stdout(sys.stderr):
            try:
                asyncio.run(main_async(parser.parse_args(json.loads(line))))
            except (Exception, SystemExit) as error:
                said = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        print(said, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
