"""Apps as quick to make as they are many: what FastAPI finds out about a route, which takes most of the time that a
proxy takes to start, is the same for every app of a process."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from fastapi.routing import APIRoute, APIRouter, request_response

_add = APIRouter.add_api_route
_known: dict[tuple[Any, ...], APIRoute] = {}


def install() -> None:
    """For every app that is made from here on."""
    setattr(APIRouter, "add_api_route", _add_known)  # noqa: B010 - a function in its place, for type checkers


def _add_known(self: APIRouter, path: str, endpoint: Callable[..., Any], **given: Any) -> None:
    """What a route knows of its app is whose dependencies replace others, and nothing else."""
    depends = [*self.dependencies, *(given.get("dependencies") or ())]
    methods = tuple(sorted(given.get("methods") or ()))
    key = (self.prefix, path, endpoint, methods, *((each.dependency, each.use_cache) for each in depends))
    known = _known.get(key)
    if known is None:
        _add(self, path, endpoint, **given)
        route = self.routes[-1]
        assert isinstance(route, APIRoute)
        _known[key] = kept = copy(route)
        # Nobody's app is kept with it.
        kept.dependency_overrides_provider = None
        kept.app = request_response(kept.get_route_handler())
        return
    route = copy(known)
    route.dependency_overrides_provider = self.dependency_overrides_provider
    route.app = request_response(route.get_route_handler())
    self.routes.append(route)
