from __future__ import annotations

from collections.abc import Iterator

import helm_python as helm
import pytest

from tests.helm import schema


@pytest.fixture(scope="session")
def chart() -> Iterator[helm.Chart]:
    with helm.Chart.load(schema.CHART) as loaded:
        yield loaded
