"""The log of receipts as it lies in Redis (`verifier_pool.link.receipts`): its signed heads, proofs and entries.

The leaves are there from the moment a verdict is; inner hashes are made of them by whoever needs one first, and kept. A
hash follows from its leaves, so it makes no difference who that is, or that two do at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from redis import Redis
from redis.exceptions import ExecAbortError, OutOfMemoryError, ResponseError

from policies import head, jws, merkle
from policies.errors import NotFound, ReceiptError
from policies.merkle import SIZE, Span, Subtree
from policies.settings import DurabilitySettings
from verifier_pool.link import durable
from verifier_pool.link.receipts import LAST, LOG, RUN, TILE, TRIES, UNKNOWN_KEY, Stored, tiles_key
from verifier_pool.link.signing import RECEIPT_KEYS, Signer

logger = logging.getLogger(__name__)

MOST_ENTRIES = 1024
"""Leaf hashes in one answer."""
_BITS = TILE.bit_length() - 1
_LATER = 1e-5
"""Seconds by which a head is younger than the one before, at least."""
_AT_ONCE = 64
"""Tiles that are read in one step."""
DURABLE_SECONDS = 2.0
"""That Redis may take to have the log on disk before its head is shown, unless `durability.timeout` is longer."""

_STATE = f"""
{RUN}
local now = redis.call('TIME')
local said = redis.call('HMGET', KEYS[1], 'id', 'size', 'head', 'head-size', 'head-time', 'run', 'kept')
local at = now[1] .. '.' .. string.format('%06d', now[2])
local found = {{said[1] or '', said[2] or '0', said[3] or '', said[4] or '-1', said[5] or '0', at}}
found[7], found[8], found[9] = said[6] or '', run(), said[7] or '0'
return found
"""
_SET_HEAD = f"""
{RUN}
if ARGV[6] ~= '' and run() ~= ARGV[6] then return -2 end
if ARGV[5] ~= '' and redis.call('HEXISTS', KEYS[2], ARGV[5]) == 0 then return {UNKNOWN_KEY} end
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
if tonumber(redis.call('HGET', KEYS[1], 'head-time') or 0) >= tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[1], 'head', ARGV[2], 'head-size', ARGV[3], 'head-time', ARGV[4])
redis.call('HSET', KEYS[1], 'kept', ARGV[7])
return 1
"""
_RESTARTED = -2
_ADOPT = f"""
{RUN}
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] or run() ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'run', ARGV[2])
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'id', ARGV[3])
  redis.call('HDEL', KEYS[1], 'head', 'head-size', 'head-time', 'kept')
end
return 1
"""
"""Lua: this run of Redis goes on with the log, or begins another one of the same leaves.

ARGV: the log's id, the run, and the id of another log or nothing. Returns 0 where the log or the run is another one.
"""
_INFO = """
local said = redis.pcall('INFO', ARGV[1])
return type(said) == 'string' and string.match(said, ARGV[2] .. ':([^\\r\\n]*)') or ''
"""
_FIRST_WITH_WAITAOF = [7, 2]


@dataclass(frozen=True, slots=True)
class State:
    """The log at one moment `now` (Unix seconds of Redis's clock), and the last head that was signed.

    Attributes:
        log_run: the run of Redis that the log belongs to. `run`: the one that this is, empty where it does not say.
        kept: the leaves under that head were where a crash leaves them.
    """

    log: str
    size: int
    head: str
    head_size: int
    head_time: float
    now: float
    log_run: str = ""
    run: str = ""
    kept: bool = False


class Signed(NamedTuple):
    """A head of so many leaves, as a JWS."""

    token: str
    size: int


@dataclass(frozen=True, slots=True)
class Proof:
    """A receipt, and the path that shows it in the log under a signed head."""

    receipt: Stored
    head: Signed
    path: list[bytes]


class Log:
    """The log, for reading and for signing its heads. Redis's own errors pass through.

    Args:
        redis: a client whose answers may take longer than `DURABLE_SECONDS`.
        rules: what has to have the leaves before a head of them is shown; the file of a Redis that keeps one has.
    """

    def __init__(self, redis: Redis, signer: Signer, rules: DurabilitySettings | None = None) -> None:
        self.redis = redis
        self.signer = signer
        self._rules = rules or DurabilitySettings()

    def state(self) -> State:
        """What is known of it now."""
        said = [each.decode() for each in cast("list[bytes]", self.redis.eval(_STATE, 1, LOG))]
        id, size, token, head_size, head_time, now, log_run, run, kept = said
        numbers = int(head_size), float(head_time), float(now)
        return State(id, int(size), token, *numbers, log_run, run, kept == "1")

    def head(self, covering: int = 0, seconds: float = 0.0) -> Signed | None:
        """A signed head; None as long as nothing is in the log.

        Args:
            covering: leaves that it must have at least.
            seconds: how old the last one may be for it to do, although the log has grown.

        Raises:
            NotFound: the log is smaller than `covering`.
            StoreUnavailable: the leaves are not durable yet, and a head could promise what a crash takes back.
            ReceiptError, SealError: there is no key to sign with.
        """
        now = self.state()
        if covering > now.size:
            raise NotFound(f"the log has {now.size} receipts")
        if not now.log:
            return None
        if now.run != now.log_run:
            now = self._adopted(now)
        good = now.head_size >= covering and (now.head_size == now.size or now.now - now.head_time < seconds)
        if good and self._is_ours(now.head):
            return Signed(now.head, now.head_size)
        return self._sign(now)

    def proof(self, receipt: Stored) -> Proof:
        """What shows a receipt in the log. Raises what `head` does."""
        found = self.head(receipt.number + 1, seconds=math.inf)
        assert found is not None
        return Proof(receipt, found, self.inclusion(receipt.number, found.size))

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """The path that shows a leaf in the tree of `size` leaves. Raises NotFound."""
        self._check(index + 1, size)
        return self._hashes(merkle.inclusion(index, size))

    def consistency(self, first: int, second: int) -> list[bytes]:
        """The path that shows the tree of `first` leaves in that of `second`. Raises NotFound."""
        self._check(first, second)
        return self._hashes(merkle.consistency(first, second))

    def root(self, size: int) -> bytes:
        """The hash of the tree of its first `size` leaves. Raises NotFound."""
        self._check(0, size)
        return self._hashes([(0, size)])[0]

    def leaf(self, index: int) -> bytes:
        """One leaf hash. Raises NotFound."""
        return self.entries(index, index + 1)[0]

    def entries(self, start: int, end: int) -> list[bytes]:
        """Leaf hashes from `start` up to below `end`, at most `MOST_ENTRIES`. Raises NotFound."""
        self._check(start, end)
        end = min(end, start + MOST_ENTRIES)
        tiles = range(start // TILE, -(-end // TILE))
        found = b"".join(self._rows(0, tiles))
        begin = (start - tiles.start * TILE) * SIZE if tiles else 0
        return _cut(found[begin : begin + (end - start) * SIZE])

    def keep(self, seconds: float) -> None:
        """Sign a head if the log has grown and the last one is so old."""
        with contextlib.suppress(NotFound):
            self.head(seconds=seconds)

    def outlives(self) -> bool:
        """Whether Redis keeps what its log needs to go on after a crash of it, by what it says; nothing is written."""
        if self._rules.replicas:
            return True
        version = [int(part) for part in self._info("server", "redis_version").split(".")[:2] if part.isdigit()]
        return version >= _FIRST_WITH_WAITAOF and self._info("persistence", "aof_enabled") == "1"

    def begin(self) -> tuple[str, str]:
        """Go on under another id, so that nothing contradicts the heads of the log before; returns both ids, the one
        before first. For a Redis that was restored from a copy. Raises NotFound where nothing is in the log."""
        for _ in range(TRIES):
            now = self.state()
            if not now.log:
                raise NotFound("nothing is in the log yet")
            after = secrets.token_hex(16)
            if self.redis.eval(_ADOPT, 1, LOG, now.log, now.run, after):
                return now.log, after
        raise ReceiptError("the log changes all the time")

    def _adopted(self, now: State) -> State:
        """The log, which belongs to another run of Redis, in this one.

        It is the same log where the leaves of its last head were on disk, and Redis has a file again and is no replica
        that took over before it had everything. Else this may be an earlier state, of which no more heads can be
        signed: they would contradict those that were shown. The leaves that are there then begin another log.
        """
        for _ in range(TRIES):
            same = self._until_durable() and now.kept and (self._rules.replicas > 0 or not self._took_over())
            other = "" if same else secrets.token_hex(16)
            done = self.redis.eval(_ADOPT, 1, LOG, now.log, now.run, other)
            if done and other:
                logger.warning(
                    "Redis restarted and may have lost receipts: another log of them begins", extra={"log": other}
                )
            now = self.state()
            if now.run == now.log_run:
                return now
        raise durable.NotDurable("Redis restarts all the time")

    def _took_over(self) -> bool:
        """Whether this Redis was a replica when it began, or one since."""
        return self._info("replication", "second_repl_offset") != "-1"

    def _info(self, section: str, name: str) -> str:
        """What the Redis that has the log, which may be one of many, says of itself; empty where it does not."""
        return cast(bytes, self.redis.eval(_INFO, 1, LOG, section, name)).decode()

    def _sign(self, now: State) -> Signed:
        kept = self._until_durable()
        if not kept and not now.run:
            raise durable.NotDurable("Redis keeps no append-only file, and does not say (INFO) when it restarted")
        root = self._hashes([(0, now.size)])[0]
        # Redis's clock may step back, or be another host's; of one log the later head is the larger one all the same.
        at = max(now.now, round(now.head_time + _LATER, 6))
        said = head.encode(now.log, now.size, root, at)
        for _ in range(TRIES):
            token, kid = self.signer.sign(said, head.KIND)
            stored = [now.log, token, str(now.size), f"{at:.6f}", kid, now.run, str(int(kept))]
            done = self.redis.eval(_SET_HEAD, 2, LOG, RECEIPT_KEYS, *stored)
            if done == _RESTARTED:
                raise durable.NotDurable("Redis restarted just now")
            if done != UNKNOWN_KEY:
                return Signed(token, now.size)
            self.signer.forget()
        raise ReceiptError("the keys that sign receipts change all the time")

    def _is_ours(self, token: str) -> bool:
        """Whether the key of a head is still published."""
        with contextlib.suppress(ReceiptError):
            return self.signer.knows(jws.kid_in(token, head.KIND))
        return False

    def _until_durable(self) -> bool:
        """Wait until all that was written so far is where a crash leaves it. Raises NotDurable.

        Returns:
            False where Redis has no such place: no append-only file that can be asked about (WAITAOF), and the settings
            ask for no replicas. Snapshots bring back an earlier state.
        """
        rules = self._rules.model_copy(update={"aof": True, "timeout": max(DURABLE_SECONDS, self._rules.timeout)})
        try:
            self._ask_durable(rules)
        except durable.NotDurable as error:
            if not isinstance(error.__cause__, ResponseError) or self._rules.aof:
                raise
            if not self._rules.replicas:
                return False
            self._ask_durable(self._rules)
        return True

    def _ask_durable(self, rules: DurabilitySettings) -> None:
        with durable.transaction(self.redis, rules) as pipeline:
            # WAITAOF is about the writes of its own connection, and all that came before them.
            pipeline.hset(LOG, "asked", f"{time.time():.3f}")
            try:
                pipeline.execute()
            except (OutOfMemoryError, ExecAbortError):
                raise durable.NotDurable("Redis has no memory left") from None

    def _check(self, first: int, second: int) -> None:
        size = self.state().size
        if not 0 <= first <= second <= size:
            raise NotFound(f"there is no such part of the log, which has {size} receipts")

    def _hashes(self, spans: Sequence[Span]) -> list[bytes]:
        parts = [merkle.perfect(span) for span in spans]
        known = self._subtrees({subtree for part in parts for subtree in part})
        return [merkle.joined([known[subtree] for subtree in part]) for part in parts]

    def _subtrees(self, wanted: Iterable[Subtree]) -> dict[Subtree, bytes]:
        """Hashes of perfect subtrees: each is made of a part of one tile, or is in one."""
        found: dict[Subtree, bytes] = {}
        by_level: dict[int, list[Subtree]] = {}
        for subtree in wanted:
            by_level.setdefault(subtree.level // _BITS, []).append(subtree)
        for level, subtrees in by_level.items():
            ends: dict[int, int] = {}
            for subtree in subtrees:
                start, end = _within(subtree)
                tile = start // TILE
                ends[tile] = max(ends.get(tile, 0), end - tile * TILE)
            rows = self._whole(level, ends)
            for subtree in subtrees:
                start, end = _within(subtree)
                row, base = rows[start // TILE], start // TILE * TILE
                found[subtree] = merkle.root(_cut(row[(start - base) * SIZE : (end - base) * SIZE]))
        return found

    def _whole(self, level: int, ends: dict[int, int]) -> dict[int, bytes]:
        """Tiles of a level, each with so many hashes at least; those of inner levels are completed."""
        rows = dict(zip(ends, self._rows(level, list(ends)), strict=True))
        for tile, end in ends.items():
            known = len(rows[tile]) // SIZE
            if known >= end:
                continue
            if level == 0:
                raise ReceiptError("the log lost leaves that it had")
            below = range(tile * TILE + known, tile * TILE + end)
            made = b""
            for at in range(below.start, below.stop, _AT_ONCE):
                some = range(at, min(at + _AT_ONCE, below.stop))
                whole = self._whole(level - 1, dict.fromkeys(some, TILE))
                made += b"".join(merkle.root(_cut(whole[number])) for number in some)
            rows[tile] += made
            with contextlib.suppress(OutOfMemoryError):
                self.redis.hset(tiles_key(level), str(tile), rows[tile])
        return rows

    def _rows(self, level: int, tiles: Sequence[int]) -> list[bytes]:
        if not tiles:
            return []
        # In one step: what was last may be a whole tile a moment later.
        with self.redis.pipeline(transaction=True) as pipeline:
            pipeline.hmget(tiles_key(level), [str(tile) for tile in tiles])
            pipeline.get(LAST)
            pipeline.hget(LOG, "size")
            found, last, size = pipeline.execute()
        known = {tile: row for tile, row in zip(tiles, found, strict=True) if row is not None}
        if level == 0 and last is not None:
            known.setdefault(int(size or 0) // TILE, last)
        return [known.get(tile, b"") for tile in tiles]


def _within(subtree: Subtree) -> Span:
    """The hashes of its level of tiles that a subtree consists of."""
    more = subtree.level % _BITS
    return subtree.number << more, (subtree.number + 1) << more


def _cut(row: bytes) -> list[bytes]:
    return [row[at : at + SIZE] for at in range(0, len(row), SIZE)]
