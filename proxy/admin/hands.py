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
from verifier_pool.link import connection, durable

_TIMEOUT = 5.0
_THREADS = 2
_POLL = 0.1

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

    async def poll(self, look: Callable[[], T], decided: Callable[[T], bool], seconds: float) -> T:
        """What `look` returns as soon as it is decided, or after so many seconds. Between two looks no thread waits, so
        nobody who waits is in the way of others. Raises what `do` does."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not decided(found := await self.do(look)) and loop.time() < deadline:  # noqa: ASYNC110 - Redis has no event
            await asyncio.sleep(_POLL)
        return found

    def close(self) -> None:
        """Let go of both."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.redis.close()
