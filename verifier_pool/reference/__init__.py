"""Interchangeable replayers behind one interface (`base.Reference`), picked by the name of their kind."""

from __future__ import annotations

import importlib

from policies.errors import SettingsError
from policies.settings import ReferenceSettings
from verifier_pool.reference.base import Reference

KINDS: dict[str, str] = {
    "vllm_http": "verifier_pool.reference.vllm_http:VllmHttp",
    "vllm_engine": "verifier_pool.reference.vllm_engine:VllmEngine",
}
"""Kind → where its class is. A class is called with the model's name and its `ReferenceSettings`."""


def open_reference(model_name: str, settings: ReferenceSettings) -> Reference:
    """Start the reference of one model; an engine loads its weights now.

    Raises:
        SettingsError: the kind is unknown, vLLM is not installed, or the model's folder cannot be served.
    """
    target = KINDS.get(settings.kind)
    if target is None:
        raise SettingsError(f"models.{model_name}.reference.kind", f"one of {', '.join(KINDS)}")
    module, _, name = target.partition(":")
    reference: Reference = getattr(importlib.import_module(module), name)(model_name, settings)
    return reference
