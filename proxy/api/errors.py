"""Every error as OpenAI-shaped JSON, also those that the framework raises itself."""

from __future__ import annotations

import math

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from policies.errors import ApiError, InvalidRequest, MethodNotAllowed, NotFound, StoreFailed, StoreUnavailable
from proxy.tap.words import said


class Unprocessable(InvalidRequest):
    """A parameter has a wrong value."""

    status = 422


def install(app: FastAPI) -> None:
    """Answer with the tree of policies.errors, whatever was raised."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(StoreUnavailable, _store_unavailable)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, unexpected)


def _respond(
    request: Request, error: ApiError, status: int | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(said(request.url.path, error), status or error.status, headers)


def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    seconds = error.retry_after if error.retry_after is not None else 1.0 if error.status == 503 else None
    return _respond(request, error, headers=None if seconds is None else {"retry-after": str(math.ceil(seconds))})


def _store_unavailable(request: Request, error: Exception) -> JSONResponse:
    return _respond(
        request, StoreFailed("what is stored cannot be read right now; try again soon"), headers={"retry-after": "1"}
    )


def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1]) if first["loc"] else None
    return _respond(request, Unprocessable(f"{name}: {first['msg']}", param=name))


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    if error.status_code == 404:
        return _respond(request, NotFound("there is nothing at this path", code="unknown_path"))
    if error.status_code == 405:
        return _respond(request, MethodNotAllowed("this path does not take this method"), headers=headers)
    wrapped = InvalidRequest(str(error.detail)) if error.status_code < 500 else ApiError(str(error.detail))
    return _respond(request, wrapped, error.status_code, headers)


def unexpected(request: Request, error: Exception) -> JSONResponse:
    """What a client is told of a fault of ours."""
    return _respond(request, ApiError("the proxy failed to serve this request", code="internal_error"))
