"""Verdicts with their receipts: signed first, then both are stored and the receipt is put into the log in one step,
which also stores what the verdict rests on.

So no verdict lacks its receipt, whatever is killed when, and no receipt is in the log twice.

    receipt:ID   "NUMBER TOKEN": its number in the log, and the receipt; kept as long as the verdict
    log          hash: `id` of the log, 32 hex digits, made with its first leaf; `size`, its leaves; `run`, the run of
                 Redis it belongs to; and of the last head that was signed `head`, with `head-size`, `head-time`, and
                 in `kept` whether its leaves were on disk
    log-tiles:N  hash: by its number a tile of the tree, 256 hashes of 32 bytes or, of the last one of an inner level,
                 fewer. Of level 0 leaf hashes, in the order of the log; of level N+1 the hashes of tiles of level N
    log-last     string: leaf hashes that do not fill a tile yet

Leaf hashes are kept for good, 32 bytes each, receipts are not: a log that forgets could not be held to what it showed.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from redis import Redis

from policies import jws, receipt
from policies.errors import ReceiptError
from policies.receipt import Facts
from verifier_pool.link.queue import PREFIX, case_key
from verifier_pool.link.scripts import STORE_VERDICT, store_verdict_args, store_verdict_keys
from verifier_pool.link.signing import RECEIPT_KEYS, RECEIPT_SIGNERS, Signer

logger = logging.getLogger(__name__)

LOG = PREFIX + "log"
LAST = PREFIX + "log-last"
TILE = 256
"""Hashes in a tile."""
UNKNOWN_KEY = -1
WITHOUT_CASE = 2
TRIES = 3

RUN = """
local function run()
  local said = redis.pcall('INFO', 'server')
  return type(said) == 'string' and string.match(said, 'run_id:(%x+)') or ''
end
"""
"""Lua: a function that tells this run of Redis from those before a restart of it; empty where it does not say."""

STORE_RECEIPT = f"""
{RUN}
local function verdict(KEYS, ARGV)
{STORE_VERDICT}
end
if ARGV[1] ~= '' and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return {UNKNOWN_KEY} end
local keys, arguments = {{}}, {{}}
for at = 8, #KEYS do keys[at - 7] = KEYS[at] end
for at = 9, #ARGV do arguments[at - 8] = ARGV[at] end
local kept = true
if ARGV[6] ~= '' and redis.call('EXISTS', keys[1]) == 0 then
  local said = redis.pcall('SET', KEYS[6], ARGV[6], 'EX', ARGV[7])
  kept = type(said) ~= 'table' or not said['err']
end
if verdict(keys, arguments) == 0 then return 0 end
if redis.call('HSETNX', KEYS[2], 'id', ARGV[4]) == 1 then redis.call('HSET', KEYS[2], 'run', run()) end
local index = redis.call('HINCRBY', KEYS[2], 'size', 1) - 1
redis.call('APPEND', KEYS[4], ARGV[3])
if index % {TILE} == {TILE} - 1 then
  redis.call('HSET', KEYS[3], string.format('%d', math.floor(index / {TILE})), redis.call('GET', KEYS[4]))
  redis.call('DEL', KEYS[4])
end
redis.call('SET', KEYS[5], string.format('%d ', index) .. ARGV[2], 'EX', ARGV[5])
redis.call('HSET', KEYS[7], ARGV[8], redis.call('TIME')[1])
redis.call('EXPIRE', KEYS[7], ARGV[5])
return kept and 1 or {WITHOUT_CASE}
"""
"""Lua: store a verdict (`scripts.STORE_VERDICT`), and with it its receipt, the receipt's leaf, and its case.

KEYS: `receipt-keys`, `log`, `log-tiles:0`, `log-last`, the receipt, the case, `receipt-signers`; then those of
`STORE_VERDICT`. ARGV: the `kid` that must be among the keys, or nothing; the receipt, its leaf hash, an id for the log
if this begins it, seconds the receipt is kept; the case, or nothing where none is kept, and seconds it is; the `kid`
that signed; then those of `STORE_VERDICT`. Returns 1 when this call stored them, 2 when it had to do without the case
because Redis is full, 0 when there was a verdict, and -1 where the key is not known any more, and nothing was done.
"""


class Stored(NamedTuple):
    """A receipt as it is kept: its number in the log, and the token."""

    number: int
    token: str


class KeptCase(NamedTuple):
    """What a verdict rests on beside the evidence, as it is stored: under which key, and for how many seconds."""

    key: str
    data: bytes
    ttl: int


class Settler:
    """Stores verdicts, with their receipts. Redis's own errors pass through."""

    def __init__(self, redis: Redis, signer: Signer) -> None:
        self.signer = signer
        self._script = redis.register_script(STORE_RECEIPT)

    def settle(
        self,
        verification: Mapping[str, Any],
        unit: bytes | None,
        facts: Facts,
        ttl: int,
        *,
        webhook: bool,
        case: KeptCase | None = None,
    ) -> bool:
        """Sign a verdict's receipt and store both, with all that `STORE_VERDICT` does. False when another came first.

        Args:
            unit: what the response says about its backend, as JSON; None where no backend is known.
            facts: what the receipt says besides.
            ttl: seconds both are kept.
            webhook: see `store_verdict_args`.
            case: kept in the same step, so that none is left over of a verdict that never came, or of another one.

        Raises:
            ReceiptError, SealError: there is no key to sign with; nothing was stored.
        """
        id = verification["id"]
        keys = store_keys(id, verification["backend"], case_key(id, "") if case is None else case.key)
        kept: list[bytes | str | int] = ["", 0] if case is None else [case.data, case.ttl]
        rest = store_verdict_args(verification, unit, ttl, webhook=webhook)
        for _ in range(TRIES):
            token, kid = self._signed(verification, facts)
            signer = jws.kid_in(token, receipt.KIND)
            mine: list[bytes | str | int] = [kid, token, receipt.leaf_of(token), secrets.token_hex(16), ttl]
            done = int(self._script(keys=keys, args=[*mine, *kept, signer, *rest]))
            if done == WITHOUT_CASE:
                logger.warning("no evidence of verification %s can be handed out: Redis is full", id)
            if done != UNKNOWN_KEY:
                return bool(done)
            self.signer.forget()
        raise ReceiptError("the keys that sign receipts change all the time")

    def _signed(self, verification: Mapping[str, Any], facts: Facts) -> tuple[str, str]:
        said = receipt.statement(dict(verification), facts, round(time.time(), 6))
        return self.signer.sign(receipt.encode(said), receipt.KIND)


def store_keys(id: str, backend: str, case: str) -> list[str]:
    """KEYS of `STORE_RECEIPT`."""
    mine = [RECEIPT_KEYS, LOG, tiles_key(0), LAST, receipt_key(id), case, RECEIPT_SIGNERS]
    return [*mine, *store_verdict_keys(id, backend)]


def receipt_of(redis: Redis, id: str) -> Stored | None:
    """The receipt of a response; None where there is none, or what is there cannot be read."""
    return stored_in(cast("bytes | None", redis.get(receipt_key(id))))


def stored_in(data: bytes | None) -> Stored | None:
    """A receipt as it lies in Redis."""
    number, _, token = (data or b"").partition(b" ")
    if not token or not number.isdigit() or not token.isascii():
        return None
    return Stored(int(number), token.decode())


def receipt_key(id: str) -> str:
    """Key of a response's receipt."""
    return f"{PREFIX}receipt:{id}"


def tiles_key(level: int) -> str:
    """Key of the tiles of one level."""
    return f"{PREFIX}log-tiles:{level}"
