"""Tests leave nothing in the home of whoever runs them."""

import os
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: opens a page in a headless browser")
    os.environ.setdefault("MEMLAB_HOME", tempfile.mkdtemp(prefix="memlab-tests-"))
