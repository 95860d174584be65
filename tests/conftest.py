"""The order of the suite: quick tests first, then real engines, then the browser.

The browser comes last for another reason, too: Playwright's synchronous interface keeps an event loop in the main
thread from its start to its end, and no test with an event loop of its own can run beside it.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)  # after the folders have set their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=stage)


def stage(item: pytest.Item) -> int:
    """0: in this process alone; 1: with engines; 2: with a browser."""
    for number, mark in ((2, "browser"), (1, "engines")):
        if item.get_closest_marker(mark) is not None:
            return number
    return 0
