"""What signs receipts: the operator's keys, or else keys of its own that are kept in Redis.

    receipt-keys  hash: by `kid` a key as JSON: `public`, `since` (Unix second from which it may sign) and, as long as
                  it may, `seed`; both in base64url, the seed sealed first (`verifier_pool.link.sealing`), and again
                  when that is by another key (`verifier_pool.link.resealing`)

    receipt-signers  hash: by `kid` of what signed a receipt, the Unix second of the last one; kept as long as that

With keys of the operator's, Redis has no say in what signs or is published. Without, a key is made by whoever needs one
first. A script checks in the step that stores a receipt that its key is published (`receipts.STORE_RECEIPT`), so nobody
goes on signing with one that is gone.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from redis import Redis

from policies import jws
from policies.documents import document
from policies.errors import NoSealingKey, ReceiptError, SealError, SettingsError
from policies.settings import ReceiptSettings, Settings
from verifier_pool.link.queue import PREFIX
from verifier_pool.link.sealing import Sealer

logger = logging.getLogger(__name__)

RECEIPT_KEYS = PREFIX + "receipt-keys"
RECEIPT_SIGNERS = PREFIX + "receipt-signers"
REFRESH_SECONDS = 30.0
"""How soon a process hears of another key in Redis."""
OVERLAP_SECONDS = 300.0
"""For how long a new key is published before it signs: longer than anybody keeps what was published (`max-age`)."""

_MAKE = """
if redis.call('HLEN', KEYS[1]) == tonumber(ARGV[3]) then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
"""
"""Lua: make a key where there are as many as were seen."""
_EXPECTED = "keys of 32 bytes each in base64url (`countersign receipts keygen`), with spaces or line ends between them"


@dataclass(frozen=True, slots=True)
class Kept:
    """A key in Redis. `key` is None once it signs no more, or where its `seed` cannot be unsealed here."""

    kid: str
    public: bytes
    since: float
    key: Ed25519PrivateKey | None
    seed: bool


class Signer:
    """Signs for one process.

    Args:
        redis: where keys are kept that the settings do not have.
        sealer: what their seeds are sealed with.

    Raises:
        SettingsError: a key of the settings is none.
    """

    def __init__(self, redis: Redis, settings: ReceiptSettings | None = None, sealer: Sealer | None = None) -> None:
        rules = settings or ReceiptSettings()
        self._redis = redis
        self._sealer = sealer or Sealer()
        self._own = read_keys(rules)
        self._known = _public_keys(rules)
        self._held: list[Kept] = []
        self._opened: dict[str, Ed25519PrivateKey] = {}
        self._seen = 0
        self._fresh = float("-inf")

    def renew(self, settings: ReceiptSettings) -> None:
        """Take over other public keys; what signs stays until the process ends."""
        self._known = _public_keys(settings)

    @property
    def configured(self) -> bool:
        """Whether the settings say what signs."""
        return bool(self._own)

    def sign(self, payload: bytes, kind: str) -> tuple[str, str]:
        """The token, and the `kid` that has to be in Redis for it to be stored; '' where that has no say.

        Raises:
            ReceiptError, SealError: there is no key to sign with.
            RedisError: a key has to be read, and cannot.
        """
        if self._own:
            return jws.sign(payload, self._own[0], kind), ""
        kept = self._current()
        assert kept.key is not None
        return jws.sign(payload, kept.key, kind), kept.kid

    def published(self) -> list[bytes]:
        """Public keys, the one that signs first. Raises what `sign` does."""
        if self._own:
            return [*map(jws.public_bytes, self._own), *self._known]
        self._current()
        return [*(kept.public for kept in reversed(self._held)), *self._known]

    def knows(self, kid: str) -> bool:
        """Whether a key is published; where it is none that is known here, Redis is asked again."""
        if kid in map(jws.kid_of, self.published()):
            return True
        self.forget()
        return kid in map(jws.kid_of, self.published())

    def unpublished(self, since: float) -> list[str]:
        """The `kid` of each key that signed receipts of any process since then (Unix seconds), and is not published
        here. Raises what `sign` does."""
        stored = cast("dict[bytes, bytes]", self._redis.hgetall(RECEIPT_SIGNERS))
        recent = [kid.decode(errors="replace") for kid, at in stored.items() if at.isdigit() and int(at) >= since]
        return [kid for kid in recent if not self.knows(kid)]

    def check(self) -> None:
        """Whether it can sign, as far as that is a matter of settings.

        Raises:
            SettingsError: what signs is sealed, and there is no key here that it could be opened with, or another be
                sealed with.
            RedisError: as `sign`.
        """
        try:
            with contextlib.suppress(ReceiptError):
                self.published()
        except NoSealingKey as error:
            expected = (
                "the keys that what signs receipts is encrypted with; `countersign receipts rotate --forget` gives "
                "those up that are lost"
            )
            raise SettingsError("storage.encryption_keys", expected) from error

    def forget(self) -> None:
        """Ask Redis again before the next signature."""
        self._fresh = float("-inf")

    def _current(self) -> Kept:
        if time.monotonic() > self._fresh + REFRESH_SECONDS:
            self._held = self._read() or self._made()
            if not _signing(self._held) and any(kept.seed for kept in self._held):
                self._held = self._instead()
            self._fresh = time.monotonic()
        now = time.time()
        usable = [kept for kept in _signing(self._held) if kept.since <= now]
        if not usable:
            self.forget()
            raise ReceiptError("no key in Redis signs receipts any more; give `receipts.signing_keys`")
        return usable[-1]

    def _read(self) -> list[Kept]:
        """The keys in Redis. One that could be opened once is known as long as this lives."""
        stored = _stored(self._redis)
        self._seen = len(stored)
        found = _kept_in(stored, self._sealer, self._opened)
        self._opened |= {kept.kid: kept.key for kept in found if kept.key is not None}
        return found

    def _made(self) -> list[Kept]:
        """The keys in Redis with one more, unless somebody else made one since they were read."""
        # Backdated, so that a clock that is behind uses it too.
        kid, record = record_of(jws.new_key(), time.time() - OVERLAP_SECONDS, self._sealer)
        self._redis.eval(_MAKE, 1, RECEIPT_KEYS, kid, record, self._seen)
        return self._read()

    def _instead(self) -> list[Kept]:
        """Keys, where none of those in Redis can be unsealed any more: no verdict is kept back for that. Raises
        NoSealingKey where no key seals here, so that another could be read by all."""
        if not self._sealer.seals:
            raise NoSealingKey("the keys that sign receipts are sealed, and there are no storage.encryption_keys here")
        logger.error(
            "no key that signs receipts can be unsealed with these storage.encryption_keys; another one signs now"
        )
        return self._made()


def signer_of(redis: Redis, settings: Settings) -> Signer:
    """What signs by these settings. Raises SettingsError."""
    return Signer(redis, settings.receipts, Sealer.of(settings.storage))


def kept_keys(redis: Redis, sealer: Sealer) -> list[Kept]:
    """The keys in Redis, the one that signs latest last."""
    return _kept_in(_stored(redis), sealer, {})


def rotate(redis: Redis, sealer: Sealer) -> tuple[str, float]:
    """Make a key that signs from `OVERLAP_SECONDS` on; those that signed before the one that does now lose their seed.

    Returns:
        Its `kid`, and from when on it signs (Unix seconds).

    Raises:
        NoSealingKey: seeds are sealed, and this one could not be.
    """
    now, found = time.time(), kept_keys(redis, sealer)
    if not sealer.seals and any(kept.seed and kept.key is None for kept in found):
        raise NoSealingKey("the keys that sign receipts are sealed, and there are no storage.encryption_keys here")
    begun = [kept for kept in _signing(found) if kept.since <= now]
    key, since = jws.new_key(), now + OVERLAP_SECONDS
    kid, record = record_of(key, since, sealer)
    with redis.pipeline() as pipeline:
        pipeline.hset(RECEIPT_KEYS, kid, record)
        for kept in begun[:-1]:
            pipeline.hset(RECEIPT_KEYS, kept.kid, _record(kept.public, kept.since))
        pipeline.execute()
    return kid, since


def replace_lost(redis: Redis, sealer: Sealer) -> tuple[str, list[str]]:
    """Make a key that signs at once, and give up the seeds that cannot be unsealed here; what they signed holds on.

    Returns:
        Its `kid`, and those of the keys that were given up.
    """
    lost = [kept for kept in kept_keys(redis, sealer) if kept.seed and kept.key is None]
    kid, record = record_of(jws.new_key(), time.time() - OVERLAP_SECONDS, sealer)
    with redis.pipeline() as pipeline:
        pipeline.hset(RECEIPT_KEYS, kid, record)
        for kept in lost:
            pipeline.hset(RECEIPT_KEYS, kept.kid, _record(kept.public, kept.since))
        pipeline.execute()
    return kid, [kept.kid for kept in lost]


def revoke(redis: Redis, kid: str, sealer: Sealer) -> str:
    """Take a key out of Redis, which is published no more: whatever it signed, nobody holds for signed.

    Returns:
        The `kid` of one that signs in its place from now on, where no other could; else ''.

    Raises:
        ReceiptError: there is no such key.
        NoSealingKey: one has to be made, and others are sealed.
    """
    found, now = kept_keys(redis, sealer), time.time()
    if kid not in [kept.kid for kept in found]:
        raise ReceiptError(f"there is no key {kid[:64]!r} in Redis")
    others = [kept for kept in found if kept.kid != kid]
    instead = ""
    with redis.pipeline() as pipeline:
        if not any(kept.since <= now for kept in _signing(others)):
            if not sealer.seals and any(kept.seed and kept.key is None for kept in found):
                raise NoSealingKey("the keys that sign receipts are sealed, and there are no storage.encryption_keys")
            instead, record = record_of(jws.new_key(), now - OVERLAP_SECONDS, sealer)
            pipeline.hset(RECEIPT_KEYS, instead, record)
        pipeline.hdel(RECEIPT_KEYS, kid)
        pipeline.execute()
    return instead


def record_of(key: Ed25519PrivateKey, since: float, sealer: Sealer) -> tuple[str, bytes]:
    """A key's `kid` and what is kept of it in Redis."""
    public = jws.public_bytes(key)
    kid = jws.kid_of(public)
    return kid, _record(public, since, sealer.seal(key.private_bytes_raw(), _about(kid)))


def resealed(kid: str, stored: bytes, sealer: Sealer) -> bytes | None:
    """What is kept of a key, with its seed sealed as it would be now; None where it is. Raises SealError."""
    kept = _record_in(kid, document(stored))
    if kept is None:
        return None
    public, since, seed = kept
    if seed is None or sealer.is_current(seed):
        return None
    return _record(public, since, sealer.seal(sealer.open(seed, _about(kid)), _about(kid)))


def read_keys(settings: ReceiptSettings) -> list[Ed25519PrivateKey]:
    """The keys of the settings, those of the file after the others. Raises SettingsError, without any key in it."""
    keys = []
    if settings.signing_keys is not None:
        keys += _keys_in(settings.signing_keys.get_secret_value(), "signing_keys")
    if settings.signing_keys_file is not None:
        try:
            text = Path(settings.signing_keys_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            expected = f"a readable file, not {settings.signing_keys_file!r} ({type(error).__name__})"
            raise SettingsError("receipts.signing_keys_file", expected) from error
        keys += _keys_in(text, "signing_keys_file")
    return keys


def _keys_in(text: str, name: str) -> list[Ed25519PrivateKey]:
    try:
        keys = [jws.key_from(jws.key_bytes(part)) for part in text.split()]
    except ReceiptError:
        keys = []
    if not keys:
        raise SettingsError(f"receipts.{name}", _EXPECTED) from None
    return keys


def _public_keys(settings: ReceiptSettings) -> Sequence[bytes]:
    try:
        return [jws.key_bytes(text) for text in settings.public_keys]
    except ReceiptError:
        raise SettingsError("receipts.public_keys", "public keys of 32 bytes in base64url") from None


def _stored(redis: Redis) -> dict[bytes, bytes]:
    return cast("dict[bytes, bytes]", redis.hgetall(RECEIPT_KEYS))


def _kept_in(stored: Mapping[bytes, bytes], sealer: Sealer, opened: Mapping[str, Ed25519PrivateKey]) -> list[Kept]:
    """The keys in a hash, the one that signs latest last. `opened` are known, though they cannot be unsealed now."""
    made = (_kept(kid.decode(errors="replace"), document(data), sealer, opened) for kid, data in stored.items())
    return sorted((kept for kept in made if kept is not None), key=lambda each: (each.since, each.kid))


def _signing(found: Sequence[Kept]) -> list[Kept]:
    return [kept for kept in found if kept.key is not None]


def _kept(
    kid: str, stored: dict[str, Any] | None, sealer: Sealer, opened: Mapping[str, Ed25519PrivateKey]
) -> Kept | None:
    """None for what is no key."""
    found = _record_in(kid, stored)
    if found is None:
        return None
    public, since, seed = found
    key = None
    if seed is not None:
        try:
            key = jws.key_from(sealer.open(seed, _about(kid)))
        except SealError:
            key = opened.get(kid)
        except ValueError:
            return None
        if key is not None and jws.public_bytes(key) != public:
            return None
    return Kept(kid, public, since, key, seed is not None)


def _record_in(kid: str, stored: dict[str, Any] | None) -> tuple[bytes, float, bytes | None] | None:
    """The public key, from when on it signs, and its seed as it is stored; None for what is no key."""
    said = stored or {}
    since, sealed = said.get("since"), said.get("seed")
    try:
        public = jws.key_bytes(str(said.get("public")))
        seed = base64.urlsafe_b64decode(sealed + "=" * (-len(sealed) % 4)) if isinstance(sealed, str) else None
    except (ReceiptError, ValueError):
        return None
    if jws.kid_of(public) != kid or not isinstance(since, int | float):
        return None
    return public, float(since), seed


def _record(public: bytes, since: float, seed: bytes | None = None) -> bytes:
    said: dict[str, Any] = {"public": jws.key_text(public), "since": round(since, 3)}
    return orjson.dumps(said if seed is None else said | {"seed": jws.key_text(seed)})


def _about(kid: str) -> bytes:
    return f"receipt-keys:{kid}".encode()
