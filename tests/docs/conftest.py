"""One trial stack for what only looks, and one per page for what its blocks do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.docs import trial
from tests.docs.trial import Trial


@pytest.fixture
def stack() -> Iterator[Trial]:
    """A stack of the test's own."""
    # The path of a Unix socket has to be short.
    with TemporaryDirectory(prefix="cs-") as folder, trial.running(Path(folder)) as running:
        yield running
