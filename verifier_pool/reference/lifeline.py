"""Loaded inside the engine's processes: they end when the process that started them does.

vLLM's EngineCore waits for its next request for ever, so a killed worker would leave its weights on the GPU and its
successor would find no memory. vLLM loads this through `worker_extension_cls`, before any weight is read.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from verifier_pool.parents import wait_for_end

OWNER = "VERIFIER_ENGINE_OWNER"
"""Environment variable: id of the process that started the engine. Not `COUNTERSIGN_…`: those are settings, also of the
processes that a worker starts."""


class Lifeline:
    """Adds nothing to vLLM's worker; importing this module is what counts."""


def watch(owner: int, core: int | None) -> None:
    """Wait until the process `owner` is gone, then kill the engine's core, where that is another one, and this one."""
    wait_for_end(owner)
    if core is not None and os.getppid() == core:
        # The core of an engine with workers of its own is not loaded with this module, and waits for ever.
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _arm() -> None:
    """Watch the owner if it started this process, or the core that did: nobody else's end is a matter of ours."""
    number = os.environ.get(OWNER, "")
    owner, parent = int(number) if number.isdecimal() else None, os.getppid()
    if owner is None or owner not in (parent, _parent_of(parent)):
        return
    core = None if parent == owner else parent
    threading.Thread(target=watch, args=(owner, core), name="lifeline", daemon=True).start()


_arm()
