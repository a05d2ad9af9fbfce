"""What the admin API does at Redis, in threads of its own: however much is asked of it, requests are not held up."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from redis import Redis
from redis.exceptions import RedisError

from policies.errors import ApiError, CountersignError, InvalidRequest, SettingsError, StoreUnavailable
from policies.settings import DurabilitySettings
from verifier_pool import connection, durable

_TIMEOUT = 5.0
_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


class Hands:
    """A client of Redis, and threads that use it."""

    def __init__(self, redis_url: str, durability: DurabilitySettings) -> None:
        self.redis: Redis = connection.connect(redis_url, timeout=_TIMEOUT + durable.seconds(durability))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="admin")

    async def do(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What `work` returns, in a thread.

        Raises StoreUnavailable where Redis does not answer, InvalidRequest for settings that cannot be, and else what
        `work` raises.
        """
        call = functools.partial(contextvars.copy_context().run, work, *arguments, **named)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except (RedisError, OSError) as error:
            raise StoreUnavailable("redis does not answer") from error
        except StoreUnavailable:
            raise
        except SettingsError as error:
            raise InvalidRequest(str(error), param=error.key) from error
        except ApiError:
            raise
        except CountersignError as error:
            raise InvalidRequest(str(error)) from error

    def close(self) -> None:
        """Let go of both."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.redis.close()
