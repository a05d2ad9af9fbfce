"""Writes that count only once Redis has them in its append-only file, or its replicas have them.

Both are asked on the connection that wrote, and in the same round trip: another one could belong to a Redis that
restarted in between and knows nothing of the write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hiredis
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ExecAbortError, ResponseError

from policies.errors import StoreUnavailable
from policies.settings import DurabilitySettings


class NotDurable(StoreUnavailable):
    """What was written may be lost in the next crash. `answers` are those of what was written, where they are known."""

    answers: Sequence[Any] = ()


def command(rules: DurabilitySettings) -> tuple[str | int, ...] | None:
    """What to ask after a write (WAITAOF, or WAIT); None where its acknowledgement is enough."""
    milliseconds = max(1, round(rules.timeout * 1000))
    if rules.aof:
        return ("WAITAOF", 1, rules.replicas, milliseconds)
    return ("WAIT", rules.replicas, milliseconds) if rules.replicas else None


def seconds(rules: DurabilitySettings) -> float:
    """How much longer a write may take for it."""
    return 0.0 if command(rules) is None else rules.timeout


def check(rules: DurabilitySettings, answer: Any) -> None:
    """Raises NotDurable when the answer says that fewer have the write than must, or that Redis cannot tell."""
    if isinstance(answer, ResponseError):
        raise NotDurable(str(answer)) from answer
    here, replicas = answer if rules.aof else (0, answer)
    if int(here) < int(rules.aof) or int(replicas) < rules.replicas:
        raise NotDurable("too few have it on disk or at all")


_MULTI, _EXEC = (hiredis.pack_command((word,)) for word in ("MULTI", "EXEC"))


class _Durable(Pipeline):
    rules: DurabilitySettings
    plain = False

    def _execute_transaction(self, connection: Any, commands: Any, raise_on_error: bool) -> list[Any]:
        execute = self._executed if self.plain else super()._execute_transaction
        found = execute(connection, commands, raise_on_error)
        question = command(self.rules)
        if question is not None:
            connection.send_command(*question)
            try:
                answer = connection.read_response()
            except ResponseError as error:
                answer = error
            try:
                check(self.rules, answer)
            except NotDurable as error:
                error.answers = found
                raise
        return found

    def _executed(self, connection: Any, commands: Any, raise_on_error: bool) -> list[Any]:
        """As redis-py does, less what that does for each command and answer, which costs several times as much as the
        command."""
        asked = [_MULTI, *[hiredis.pack_command(tuple(args)) for args, _ in commands], _EXEC]
        connection.send_packed_command([b"".join(asked)])
        errors: list[Exception] = []
        for _ in range(1 + len(commands)):
            try:
                connection.read_response()
            except ResponseError as error:
                errors.append(error)
        try:
            found = connection.read_response()
        except ExecAbortError as error:
            raise (errors[0] if errors else error) from None
        if raise_on_error:
            for each in found:
                if isinstance(each, Exception):
                    raise each
        answers: list[Any] = found
        return answers


def evaluate(
    redis: Redis, rules: DurabilitySettings, script: str, keys: Sequence[str], arguments: Sequence[bytes | str | int]
) -> Any:
    """What a script answers that changes something, once that is durable. Raises NotDurable where it did, and it may
    be lost."""
    with transaction(redis, rules) as pipeline:
        pipeline.eval(script, len(keys), *keys, *arguments)
        try:
            return pipeline.execute()[0]
        except NotDurable as error:
            if not any(error.answers):
                return error.answers[0] if error.answers else None
            raise


def transaction(redis: Redis, rules: DurabilitySettings, *, plain: bool = False) -> Pipeline:
    """A transaction of `redis` whose `execute` returns only once it is durable.

    Where it is `plain`, nothing is watched, and answers are as Redis gave them.

    Its time-out for an answer must be longer than the rules'. `execute` raises NotDurable when it was executed but
    not durable in time.
    """
    pipeline = _Durable(redis.connection_pool, redis.response_callbacks, True, None)
    pipeline.rules, pipeline.plain = rules, plain
    return pipeline


def answer_of(rules: DurabilitySettings, answers: Sequence[Any]) -> None:
    """Check the answers, errors among them, of a pipeline that ended with `command` if there is one.

    Raises the error of anything else, and NotDurable.
    """
    written = answers if command(rules) is None else answers[:-1]
    for answer in written:
        if isinstance(answer, Exception):
            raise answer
    if len(written) < len(answers):
        check(rules, answers[-1])
