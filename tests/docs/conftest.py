"""One trial stack for the pages that leave it as open as it was, and one for each that does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.docs import trial
from tests.docs.trial import Trial


@pytest.fixture
def stack() -> Iterator[Trial]:
    """A stack of the test's own."""
    with _running() as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[Trial]:
    """A stack of all tests that ask for it, each of which leaves it serving whoever is on this machine."""
    with _running() as running:
        yield running


@contextmanager
def _running() -> Iterator[Trial]:
    # The path of a Unix socket has to be short.
    with TemporaryDirectory(prefix="cs-") as folder, trial.running(Path(folder)) as running:
        yield running
