"""Markers of these tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "browser: opens a page in headless Chromium; skipped where there is none"
    )
