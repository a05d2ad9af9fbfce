"""The operator's declarations: `countersign.yaml`, every key overridable by `COUNTERSIGN_…`.

Pure: text and an environment mapping in, a `Settings` value out. An environment name joins the path of a
key with double underscores: `COUNTERSIGN_AUDIT__RATE=0.1`, `COUNTERSIGN_BACKENDS__0__URL=…`; its value is
read as YAML, so numbers, booleans and lists work, except where the setting is text: that is taken as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, model_validator

from policies._admin import AdminKey, AdminSettings
from policies._backend_rules import BackendSettings, BreakerSettings, HealthSettings, RoutingSettings
from policies._bounds import BoundsSettings
from policies._deliveries import DeliverySettings
from policies._key_rules import ClientKey, LimitSettings, StoredKey
from policies._metrics import MetricsSettings
from policies._receipts import ReceiptSettings
from policies._rules import (
    AuditSettings,
    DurabilitySettings,
    StandingSettings,
    TimeoutSettings,
    VerificationSettings,
    WebhookSettings,
)
from policies._sections import Section, read_tree, says_nothing
from policies._storage import Retain, StorageSettings, keeps
from policies._telemetry import TelemetrySettings
from policies.errors import SettingsError

__all__ = [
    "AdminKey",
    "AdminSettings",
    "AuditSettings",
    "BackendSettings",
    "BoundsSettings",
    "BreakerSettings",
    "ClientKey",
    "DeliverySettings",
    "DurabilitySettings",
    "HealthSettings",
    "LimitSettings",
    "MetricsSettings",
    "ModelSettings",
    "ReceiptSettings",
    "ReferenceSettings",
    "Retain",
    "RoutingSettings",
    "Settings",
    "StandingSettings",
    "StorageSettings",
    "StoredKey",
    "TelemetrySettings",
    "TimeoutSettings",
    "VerificationSettings",
    "WebhookSettings",
    "embedded_dir",
    "hash_key",
    "keeps",
    "parse_settings",
    "says_nothing",
    "store_url",
]


class ReferenceSettings(Section):
    """The trusted engine that replays.

    Attributes:
        kind: `vllm_engine` runs in the worker and needs `path`; `vllm_http` asks the server at `url`.
        path: folder of the model that an engine loads.
        url: address of the server, without `/v1`.
        api_key: what the server is asked with.
        served_model: the model's name at the server, when it differs.
        engine: keyword arguments for vLLM's engine (`max_num_seqs`, `max_num_batched_tokens`, …).
        timeout: seconds that the server may take for one replay.
        max_in_flight: replays that one reference process holds at once; the engine batches them.
        max_in_flight_tokens: their tokens, prompts and outputs together; one longer replay runs alone.
        canary_seconds: how often replays with known answers are mixed in, besides those after a replay that accuses a
            backend; 0 is never, and what accuses is then believed as it is.
    """

    kind: Literal["vllm_engine", "vllm_http"]
    path: str | None = None
    url: str | None = None
    api_key: SecretStr | None = None
    served_model: str | None = None
    engine: dict[str, Any] = Field(default_factory=dict)
    timeout: float = Field(60.0, gt=0)
    max_in_flight: int = Field(256, gt=0)
    max_in_flight_tokens: int = Field(262_144, gt=0)
    canary_seconds: float = Field(60.0, ge=0)

    @model_validator(mode="after")
    def _has_target(self) -> ReferenceSettings:
        if self.kind == "vllm_engine" and not self.path:
            raise ValueError("path is needed for kind vllm_engine")
        if self.kind == "vllm_http" and not self.url:
            raise ValueError("url is needed for kind vllm_http")
        return self


class ModelSettings(Section):
    """One model the proxy offers, as the operator declares it.

    Attributes:
        tokenizer: folder or file of the model's `tokenizer.json`; rebuilds token strings for clients that
            ask for logprobs.
        vocab_size: number of token ids the model can emit.
        max_model_len: longest prompt plus answer, in tokens.
        template_tokens: tokens that its chat template may put around a request, beyond one for each byte of its JSON;
            limits hold so many with it, and more are not charged.
        generation_config: the declared model's `generation_config.json`, whose defaults vLLM would apply.
        eos_token_ids: tokens that end an answer.
        grammar: where its servers bind a grammar that a request did not ask for: nowhere (`asked`), wherever tools are
            offered (`tools`: vLLM's `--tool-strict-level`, or a parser that does so by itself, as glm47's and Cohere's
            do), or in every chat request (`always`: Mistral's own tokenizers).
        experts: number of experts of a mixture-of-experts model, whose answers must then come with expert ids.
        profile: file with the calibrated null distributions.
        second_reference: another trusted engine. An answer that speaks against its backend by a calibrated check is
            replayed there too, and counts in the backend's standing only when it does so there as well.
        second_profile: file with the null distributions of that one.
        routing: which of its backends takes a request, where that is not as for the other models.
    """

    tokenizer: str | None = None
    vocab_size: int | None = Field(None, gt=0)
    max_model_len: int | None = Field(None, gt=0)
    template_tokens: int = Field(0, ge=0, le=1_000_000)
    generation_config: dict[str, Any] = Field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    grammar: Literal["asked", "tools", "always"] = "asked"
    experts: int | None = Field(None, gt=0)
    profile: str | None = None
    reference: ReferenceSettings | None = None
    second_reference: ReferenceSettings | None = None
    second_profile: str | None = None
    routing: RoutingSettings | None = None

    @model_validator(mode="after")
    def _second_is_whole(self) -> ModelSettings:
        if (self.second_reference is None) != (self.second_profile is None):
            raise ValueError("second_reference and second_profile come together")
        return self


class RelaySettings(Section):
    """How answers travel.

    Attributes:
        keepalive: seconds of silence after which the client of a stream gets a comment (`: countersign-ping`), so that
            nothing on its way closes the connection; 0 is never. Once one went out before the answer, an error can only
            come as the stream's last event.
        retries: further backends that are asked, as long as nothing was sent, when one breaks off, is silent for too
            long or answers 408, 429, 500, 502, 503 or 504.
        passthrough: other paths that are relayed as they come, unverified (`endpoint`); their JSON names the model.
    """

    keepalive: float = Field(0.0, ge=0, le=300)
    retries: int = Field(2, ge=0, le=16)
    passthrough: tuple[Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$")], ...] = (
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
    )


class Settings(Section):
    """Everything an operator can set.

    Attributes:
        host: address that the proxy listens at; `0.0.0.0` is every one of the machine, which needs a client key.
        port: where it listens; 0 is any free one.
        redis_url: the Redis that proxies and workers share (`redis://`, `rediss://`, `unix://`, and with `+sentinel` or
            `+cluster` after the first word); without one `serve` runs a Valkey of its own on this machine.
        limits: of every client key without its own, and of this machine where there are no keys.
        profile_keys: public keys (Ed25519, 32 bytes in base64, as `countersign profile keygen` prints them); when there
            are any, profiles must be signed by one of them.
    """

    host: str = "127.0.0.1"
    port: int = Field(8700, ge=0, lt=65536)
    redis_url: str | None = None
    embedded_dir: str | None = Field(None, description="folder of the embedded Valkey's socket and data")
    keys: tuple[ClientKey, ...] = ()
    limits: LimitSettings = LimitSettings()
    models: dict[str, ModelSettings] = Field(default_factory=dict)
    backends: tuple[BackendSettings, ...] = ()
    profile_keys: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{43}=$")], ...] = ()
    timeouts: TimeoutSettings = TimeoutSettings()
    relay: RelaySettings = RelaySettings()
    routing: RoutingSettings = RoutingSettings()
    health: HealthSettings = HealthSettings()
    breaker: BreakerSettings = BreakerSettings()
    verification: VerificationSettings = VerificationSettings()
    audit: AuditSettings = AuditSettings()
    standing: StandingSettings = StandingSettings()
    durability: DurabilitySettings = DurabilitySettings()
    webhook: WebhookSettings | None = None
    deliveries: DeliverySettings = DeliverySettings()
    storage: StorageSettings = StorageSettings()
    receipts: ReceiptSettings = ReceiptSettings()
    bounds: BoundsSettings = BoundsSettings()
    admin: AdminSettings = AdminSettings()
    metrics: MetricsSettings = MetricsSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        names = [backend.name for backend in self.backends]
        if len(set(names)) != len(names):
            raise ValueError("backends: two backends share one name")
        for backend in self.backends:
            if backend.model not in self.models:
                raise ValueError(f"backends.{backend.name}.model: {backend.model!r} is not among models")
        if self.port and self.admin.port == self.port and _may_meet(self.host, self.admin.host):
            raise ValueError("admin.port: the proxy listens there, the admin API needs another")
        shared = {key.sha256 for key in self.keys}.intersection(key.sha256 for key in self.admin.keys)
        if shared:
            raise ValueError("admin.keys: a client key is no admin key, and two have the same text")
        return self

    def backend(self, name: str) -> BackendSettings:
        """The backend of that name. Raises KeyError."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise KeyError(name)

    def standing_of(self, name: str) -> StandingSettings:
        """The rules of standing for a backend, with its own alpha where it has one; also for one no longer declared."""
        own = next((backend.alpha for backend in self.backends if backend.name == name), None)
        return self.standing if own is None else self.standing.model_copy(update={"alpha": own})


def _may_meet(host: str, other: str) -> bool:
    """Whether what listens at one may be in the way of the other; only two different addresses cannot."""
    return host == other or not {host, other}.isdisjoint(("0.0.0.0", "::", "", "localhost"))


def hash_key(key: str | bytes) -> str:
    """SHA-256 of a client key, hex."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def parse_settings(text: str, environ: Mapping[str, str]) -> Settings:
    """Settings from YAML text and overrides. Raises SettingsError, which names the key."""
    tree = read_tree(text, environ)
    try:
        return Settings.model_validate(tree)
    except RecursionError as error:
        raise SettingsError("countersign.yaml", "settings that are less deep") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "countersign.yaml"
        raise SettingsError(key, first["msg"]) from error


def store_url(settings: Settings, environ: Mapping[str, str]) -> str:
    """URL of Redis: the operator's, or the Unix socket of the embedded Valkey on this machine.

    Raises SettingsError when the socket's path is longer than a Unix socket allows (107 bytes).
    """
    if settings.redis_url:
        return settings.redis_url
    socket = f"{embedded_dir(settings, environ)}/valkey.sock"
    if len(socket.encode()) > 107:
        raise SettingsError("embedded_dir", f"a folder whose path is short enough for a Unix socket, not {socket!r}")
    return f"unix://{socket}"


def embedded_dir(settings: Settings, environ: Mapping[str, str]) -> str:
    """Folder of the embedded Valkey's socket and data."""
    if settings.embedded_dir:
        return settings.embedded_dir
    state = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '')}/.local/state"
    return f"{state}/countersign"
