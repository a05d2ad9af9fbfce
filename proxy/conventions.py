"""What OpenTelemetry's GenAI conventions call things, in metrics and in traces alike."""

from __future__ import annotations

PROVIDER = "vllm"
"""All backends are declared to run it."""
_OPERATIONS = {
    "chat": "chat",
    "completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}


def operation_of(endpoint: str) -> str:
    """What an endpoint does; those that the conventions have no word for go by their path."""
    return _OPERATIONS.get(endpoint, endpoint)
