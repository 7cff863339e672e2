"""A pytest plugin for Pythons without torch: a test that stops at `import torch` is skipped, and counted."""

from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Turn that one error into a skip."""
    report = yield
    missing = call.excinfo is not None and call.excinfo.errisinstance(ModuleNotFoundError)
    if missing and call.excinfo.value.name == "torch":
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], "needs torch")
    return report
