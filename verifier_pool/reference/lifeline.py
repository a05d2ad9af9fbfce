"""Loaded inside the engine's processes: they end when the process that started them does.

vLLM's EngineCore waits for its next request for ever, so a killed worker would leave its weights on the GPU and its
successor would find no memory. vLLM loads this through `worker_extension_cls`, before any weight is read.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

OWNER = "COUNTERSIGN_ENGINE_OWNER"
"""Environment variable: id of the process that started the engine."""

POLL_SECONDS = 1.0


class Lifeline:
    """Adds nothing to vLLM's worker; importing this module is what counts."""


def watch(owner: int) -> None:
    """Wait until the process `owner` is gone, then kill the engine's core and this process."""
    parent = os.getppid()
    _wait_for_end(owner)
    if parent not in (owner, 1) and os.getppid() == parent:
        # A worker of a tensor-parallel engine: its core is not loaded with this module, and waits for ever.
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(owner: int) -> None:
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # No such descriptors here (an old kernel, or not Linux): the number is looked at instead.
        while _runs(owner):
            time.sleep(POLL_SECONDS)
        return
    select.select([descriptor], [], [])


def _runs(owner: int) -> bool:
    try:
        os.kill(owner, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _arm() -> None:
    owner = os.environ.get(OWNER, "")
    if owner.isdecimal() and int(owner) != os.getpid():
        threading.Thread(target=watch, args=(int(owner),), name="lifeline", daemon=True).start()


_arm()
