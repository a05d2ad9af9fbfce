"""The errors that rooms share; a room's own derive from these.

CountersignError
├── SettingsError        a setting is missing or wrong; names the key; exit code 3
├── EvidenceError        evidence bytes cannot be written or read back
│   └── OtherVersion     they are whole, and not of the version that reads them
├── BundleError          an evidence bundle, or a part of one, cannot be written or read back
├── ReceiptError         a receipt, the head of the log or a proof does not hold
│   └── ForkedLog        the log is not the one that was seen before, or lost something
├── SealError            an encrypted value cannot be decrypted: it was changed, or belongs to something else
│   └── NoSealingKey     its key is not among those of the settings
├── ProfileError         a calibration profile is malformed, or measured from too little
├── ReplayError          the reference could not replay or render
├── StoreUnavailable     Redis did not answer
└── ApiError             answered to a client as OpenAI-shaped JSON
    ├── InvalidRequest         400
    ├── AuthenticationFailed   401
    ├── PermissionDenied       403
    ├── NotFound               404
    ├── MethodNotAllowed       405
    ├── RequestTimeout         408  the request did not arrive in time
    ├── Conflict               409
    ├── RequestTooLarge        413
    ├── UriTooLong             414
    ├── UnsupportedMedia       415  a body in a coding that is not read here
    ├── RateLimited            429  the key's limit of requests or tokens
    ├── QuotaExceeded          429  the key's budget is spent
    ├── HeadersTooLarge        431
    ├── VerificationFailed     502  a policy refused a rejected answer
    ├── UpstreamFailed         502  the backend broke before the first byte
    ├── BackendUnavailable     503
    ├── StoreFailed            503  what is stored cannot be read right now
    ├── KeysUnavailable        503  a key cannot be checked right now
    └── UpstreamTimeout        504
"""

from __future__ import annotations

from typing import Any, ClassVar


class CountersignError(Exception):
    """Root of every error raised on purpose."""


class SettingsError(CountersignError):
    """A setting is missing or wrong."""

    exit_code: ClassVar[int] = 3

    def __init__(self, key: str, expected: str) -> None:
        super().__init__(f"setting {key!r}: {expected}")
        self.key = key
        self.expected = expected


class EvidenceError(CountersignError):
    """Evidence bytes cannot be written or read back."""


class OtherVersion(EvidenceError):
    """Evidence is whole, and another version of this program wrote it: one that reads it may come."""


class ReceiptError(CountersignError):
    """A receipt, the head of the log or a proof does not hold; says why in plain words."""


class ForkedLog(ReceiptError):
    """A log does not continue the one that was seen before: it was cut, changed, or is shown differently to others.

    `before` and `after` are the two signed heads (JWS) that contradict each other: together they prove it.
    """

    def __init__(self, message: str, before: str, after: str) -> None:
        super().__init__(message)
        self.before = before
        self.after = after


class SealError(CountersignError):
    """An encrypted value cannot be decrypted: it was changed, cut off, or belongs to something else."""


class NoSealingKey(SealError):
    """An encrypted value is whole, as far as can be told, and its key is not among those of the settings."""


class BundleError(CountersignError):
    """An evidence bundle, or a part of one, cannot be written or read back."""


class ProfileError(CountersignError):
    """A calibration profile is malformed, or measured from too little."""


class ReplayError(CountersignError):
    """The reference could not replay or render.

    `reason` is a short code that ends up in the verdict, such as `too_long`.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class StoreUnavailable(CountersignError):
    """Redis did not answer."""


class NoConnection(StoreUnavailable):
    """This machine has no connection left to ask Redis with, which says nothing about Redis."""


class ApiError(CountersignError):
    """Answered to a client as `{"error": {"message", "type", "param", "code"}}`.

    `retry_after` is how many seconds later it may go better; None where nobody knows. `unread`: the request's body is
    not all read.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    retry_after: float | None = None
    unread = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code if code is not None else self.code

    def body(self) -> dict[str, Any]:
        """The OpenAI-shaped JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.error_code,
            }
        }


class InvalidRequest(ApiError):
    """The request cannot be served as it is."""

    status = 400
    type = "invalid_request_error"


class AuthenticationFailed(ApiError):
    """No valid key came with the request."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(ApiError):
    """The key is valid and may not do this."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class NotFound(ApiError):
    """Nothing of that name, or not for this key."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(ApiError):
    """The path exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(ApiError):
    """The request did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Conflict(ApiError):
    """It makes no sense as things are."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class RequestTooLarge(ApiError):
    """The request body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UriTooLong(ApiError):
    """The URL is over the limit."""

    status = 414
    type = "invalid_request_error"
    code = "uri_too_long"


class UnsupportedMedia(ApiError):
    """The body comes in a coding that is not read here."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"


class HeadersTooLarge(ApiError):
    """The headers are over the limit, in bytes or in number."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class RateLimited(ApiError):
    """The key has reached a limit, which passes by itself after `retry_after` seconds; None is never, as it is.

    `headers` are those that tell of it.
    """

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float | None, kind: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self._kind = kind or self.type

    def body(self) -> dict[str, Any]:
        """As any, but its type says what there is too much of: `requests` or `tokens`."""
        body = super().body()
        body["error"]["type"] = self._kind
        return body


class QuotaExceeded(RateLimited):
    """What is left of the key's budget does not cover the request."""

    type = "insufficient_quota"
    code = "insufficient_quota"


class UnsupportedTransfer(ApiError):
    """The body comes in a transfer coding that is not undone here."""

    status = 501
    type = "invalid_request_error"
    code = "unsupported_transfer"


class VerificationFailed(ApiError):
    """The answer was rejected and the policy is to withhold it."""

    status = 502
    code = "verification_failed"


class UpstreamFailed(ApiError):
    """The backend broke before its first byte."""

    status = 502
    code = "upstream_failed"


class BackendUnavailable(ApiError):
    """No backend can take the request; one may after `retry_after` seconds."""

    status = 503
    code = "backend_unavailable"

    def __init__(self, message: str, *, code: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class StoreFailed(ApiError):
    """What is stored cannot be read right now."""

    status = 503
    code = "store_unavailable"


class KeysUnavailable(ApiError):
    """Redis cannot be asked about a key that is not known here: our trouble, which says nothing about the key."""

    status = 503
    code = "keys_unavailable"


class UpstreamTimeout(ApiError):
    """The backend was silent for too long before its first byte."""

    status = 504
    code = "upstream_timeout"
