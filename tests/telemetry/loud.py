"""`countersign` with every logger of the process at its loudest, and checks that break on purpose.

`python -m tests.telemetry.loud COMMAND …`
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from typing import Any

import countersign
from policies import structure
from policies.checks import Check
from policies.evidence import Evidence
from verifier_pool import worker
from verifier_pool.link.telemetry import log

CRASH = b"crash-in-a-check"
"""In a prompt: the checks of the answer break."""
LOST = b"crash-in-a-task"
"""In a prompt: a task breaks that nobody waits for, and Python is warned of something."""


def main() -> int:
    """Run the command."""
    configure, check = log.configure, structure.check

    def loudly(*given: Any, **named: Any) -> None:
        configure(*given, **named)
        root = logging.getLogger()
        root.setLevel("DEBUG")
        (handler,) = root.handlers
        handler.others = 0  # type: ignore[attr-defined]
        for name in ("rq", "rq.worker", "redis", "httpx", "httpcore", "aiohttp", "urllib3", "uvicorn", "asyncio"):
            logging.getLogger(name).setLevel("DEBUG")

    def breaking(choice: Evidence, **named: Any) -> Check:
        if CRASH in choice.request:
            raise ValueError(f"{choice.request!r} {choice.output_ids.tolist()} {choice}")
        if LOST in choice.request:
            asyncio.run(_lose(choice))
            warnings.warn(f"{choice.request!r}", ResourceWarning, stacklevel=1)
        return check(choice, **named)

    log.configure, structure.check = loudly, breaking  # type: ignore[assignment]
    warnings.simplefilter("always", ResourceWarning)
    worker.COMMAND = (sys.executable, "-m", "tests.telemetry.loud", "worker")
    return countersign.main(sys.argv[1:])


async def _lose(choice: Evidence) -> None:
    async def lost() -> None:
        raise LookupError(f"{choice.request!r}")

    asyncio.get_running_loop().set_debug(True)
    asyncio.get_running_loop().call_soon(_fail, choice)
    task = asyncio.create_task(lost())
    await asyncio.sleep(0)
    del task
    await asyncio.sleep(0)


def _fail(choice: Evidence) -> None:
    raise ValueError(f"{choice.request!r}")


if __name__ == "__main__":
    raise SystemExit(main())
