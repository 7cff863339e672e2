"""Tests leave nothing in the home of whoever runs them; the browser's fixture for all of them."""

import os
import signal
import tempfile

import pytest

from tests.browser import chromium

__all__ = ["chromium"]


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("MEMLAB_HOME", tempfile.mkdtemp(prefix="memlab-tests-"))
    # a shell's background job ignores SIGINT and hands that on: runs that tests interrupt would never end
    signal.signal(signal.SIGINT, signal.default_int_handler)
