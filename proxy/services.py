"""What every request needs, made once at the start and handed around."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from yarl import URL

from policies.errors import SettingsError
from policies.settings import BackendSettings, Settings
from proxy.admin.hands import Hands
from proxy.api.auth import Keys
from proxy.backends.backend import Standing
from proxy.backends.pool import Backends
from proxy.backends.probes import Probes
from proxy.backends.records import Records
from proxy.backends.standings import Standings
from proxy.drain import Drain
from proxy.limits.limiter import Limiter
from proxy.limits.registry import Registry
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.receipts import Receipts
from proxy.recorder import Recorder
from proxy.relay.transport import AiohttpTransport, Transport
from proxy.room import Holding
from proxy.store import Store
from proxy.tap import TokenStrings
from proxy.uploads import Uploads
from verifier_pool.link import connection
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.telemetry.tracing import Tracing

_HEADER_TEXT = re.compile(r"[\x21-\x7e]*")
_SAID_ONCE = (b"host", b"origin", b"x-countersign-backend")


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a running proxy."""

    settings: Settings
    keys: Keys
    registry: Registry
    limiter: Limiter
    backends: Backends
    standings: Standings
    records: Records
    probes: Probes
    transport: Transport
    outage: Outage
    store: Store
    recorder: Recorder
    receipts: Receipts
    metrics: Metrics
    tokenizers: Mapping[str, TokenStrings]
    drain: Drain
    holding: Holding
    uploads: Uploads
    tracing: Tracing | None
    hands: Hands
    sealer: Sealer

    @classmethod
    async def start(
        cls, settings: Settings, redis_url: str, tokenizers: Mapping[str, TokenStrings], drain: Drain
    ) -> Services:
        """Make every part and start those that run on their own; needs a running event loop."""
        sealer = Sealer.of(settings.storage)
        outage, metrics, backends = Outage(), Metrics(), Backends(settings)
        tracing = Tracing.open(settings.telemetry, "proxy")
        holding = Holding(settings.bounds.held_bytes)
        store = Store(
            redis_url,
            settings.verification,
            outage,
            metrics,
            lambda: drain.draining,
            durability=settings.durability,
        )
        metrics.watch(lambda: list(backends.groups.values()))
        metrics.watch_store(outage)
        metrics.count_flights(lambda: drain.in_flight)
        transport = AiohttpTransport(settings.timeouts)
        metrics.count_unasked(lambda: transport.unasked)
        receipts = Receipts(redis_url, settings)
        metrics.count_unpublished(lambda: receipts.unpublished)
        registry = Registry(store)
        services = cls(
            settings=settings,
            keys=Keys(settings.keys, settings.limits, registry),
            registry=registry,
            limiter=Limiter(store, metrics),
            backends=backends,
            standings=Standings(store, backends),
            records=Records(store, settings),
            probes=Probes(settings.health, backends, metrics),
            transport=transport,
            outage=outage,
            store=store,
            recorder=Recorder(redis_url, settings, outage, metrics, tracing=tracing, sealer=sealer),
            receipts=receipts,
            metrics=metrics,
            tokenizers=tokenizers,
            drain=drain,
            holding=holding,
            uploads=Uploads(holding, metrics),
            tracing=tracing,
            hands=Hands(redis_url, settings.durability),
            sealer=sealer,
        )
        metrics.start(redis_url, settings)
        services.recorder.start()
        await services.receipts.start()
        await services.store.start()
        await services.registry.start()
        await services.limiter.start()
        await services.standings.start()
        services.probes.start()
        return services

    def renewed(
        self, settings: Settings, tokenizers: Mapping[str, TokenStrings], known: Mapping[str, Standing]
    ) -> Services:
        """The same parts under other settings, for requests from here on; those under way keep what they began with.

        Args:
            tokenizers: of all models that have one.
            known: standings, by name, of backends that are declared anew.
        """
        self.backends.renew(settings, known)
        self.probes.renew(settings.health)
        self.store.renew(settings.verification)
        self.recorder.renew(settings)
        self.receipts.renew(settings)
        self.metrics.renew(settings)
        return replace(
            self,
            settings=settings,
            keys=Keys(settings.keys, settings.limits, self.registry),
            records=Records(self.store, settings),
            tokenizers=tokenizers,
        )

    async def stop(self) -> None:
        """Record what is still to be recorded, then let go of everything."""
        await asyncio.to_thread(self.recorder.stop)
        await self.receipts.close()
        await self.probes.close()
        await self.standings.close()
        await self.registry.close()
        await self.limiter.close()
        await self.store.close()
        await self.transport.close()
        self.hands.close()
        await asyncio.to_thread(self.metrics.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def check_addresses(settings: Settings, redis_url: str) -> None:
    """Whether Redis and every backend can be addressed at all, which else only requests would find out.

    Raises SettingsError.
    """
    connection.connect(redis_url).close()
    for at, backend in enumerate(settings.backends):
        check_backend(backend, f"backends.{at}")


def check_backend(backend: BackendSettings, key: str) -> None:
    """Whether a backend can be addressed. Raises SettingsError, which names its setting below `key`."""
    try:
        host = URL(backend.url).host
    except ValueError:
        host = None
    if not host:
        raise SettingsError(f"{key}.url", "an http:// or https:// address with a host")
    if backend.api_key is not None and not _HEADER_TEXT.fullmatch(backend.api_key.get_secret_value()):
        raise SettingsError(f"{key}.api_key", "printable ASCII without spaces")


def load_tokenizers(
    settings: Settings, before: Settings | None = None, loaded_before: Mapping[str, TokenStrings] | None = None
) -> dict[str, TokenStrings]:
    """Token strings of every model that declares a tokenizer; those of settings `before` that declare the same are not
    read again. Raises SettingsError."""
    loaded, known = {}, loaded_before or {}
    for name, model in settings.models.items():
        if model.tokenizer is None:
            continue
        if before is not None and name in known and before.models[name].tokenizer == model.tokenizer:
            loaded[name] = known[name]
            continue
        try:
            loaded[name] = TokenStrings.load(model.tokenizer)
        except (OSError, ValueError) as error:
            expected = f"a readable tokenizer.json or its folder, not {model.tokenizer!r}"
            raise SettingsError(f"models.{name}.tokenizer", expected) from error
    return loaded


def header_map(raw: list[tuple[bytes, bytes]]) -> Mapping[bytes, bytes]:
    """Request headers by (lower-case) name; of repeated ones the first counts.

    Host and Origin say where a request came from, an admin's hint where it goes, and nothing may hide behind the first:
    repeated, they are joined, which none of them can be.
    """
    headers: dict[bytes, bytes] = {}
    for name, value in raw:
        if name in _SAID_ONCE and name in headers:
            headers[name] += b", " + value
        else:
            headers.setdefault(name, value)
    return headers
