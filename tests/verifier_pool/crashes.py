"""Work in a process of its own that dies in the middle, at any command it sends to Redis."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from redis.connection import AbstractConnection


def survives(work: Callable[[], object], command: int) -> bool:
    """Run `work` in a fork that is killed just before it sends its `command`-th command (from 0), handshakes included.

    Returns whether it came to its end before that. `work` has to open its own connections.
    """
    child = os.fork()
    if child == 0:
        try:
            _die_before(command)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return _ended(child)


def together(*works: Callable[[], object]) -> None:
    """Run all in forks of their own at once; fails unless each comes to its end."""
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    ended = [_ended(child) for child in children]
    assert all(ended)


def _ended(child: int) -> bool:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        pytest.fail(f"the process ended with {code}")
    return code == 0


def _die_before(command: int) -> None:
    sent = [0]
    send: Any = AbstractConnection.send_packed_command

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        if sent[0] == command:
            os.kill(os.getpid(), signal.SIGKILL)
        sent[0] += 1
        return send(self, *arguments, **options)

    AbstractConnection.send_packed_command = counting  # type: ignore[method-assign]
