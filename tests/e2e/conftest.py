"""What several end-to-end tests share beside the server: a profile of it, measured once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.demo.models import DemoModels
from tests.e2e.product import calibrated

TESTS = Path(__file__).parents[1]
LONGEST = (
    "e2e/test_standing.py",
    "e2e/test_main_job.py",
    "benchmarks/test_cost_engine.py",
    "verifier_pool/reference/test_vllm_engine.py",
    "e2e/test_options.py",
    "e2e/test_differential.py",
    "e2e/test_text.py",
    "e2e/test_selection_vllm.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files are run side by side, and the longest ones begin: so none of them is left to the end, alone."""
    order = {TESTS / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session")
def profile(demo_models: DemoModels, vllm_server: str, valkey: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the honest server, of 40 answers. While developing, TEST_PROFILE names one made before."""
    made = os.environ.get("TEST_PROFILE")
    if made:
        return Path(made)
    return calibrated(demo_models, vllm_server, valkey, tmp_path_factory.mktemp("profile"))
