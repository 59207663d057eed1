"""One Chromium for all browser tests of a worker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from browser.windows import Windows

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def unavailable(reason: str) -> None:
    """Skip, but never where continuous integration believes that these tests ran."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; install it, or these tests prove nothing", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("the package playwright is not installed")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        unavailable(f"no browser found: none of {', '.join(BROWSERS)} is on the path")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def every_window(browser: Any) -> Windows:
    return Windows(browser)


@pytest.fixture
def windows(every_window: Windows) -> Windows:
    """The windows of the browser, all of them free."""
    every_window.begin()
    return every_window


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/browser/" in item.path.as_posix():
            item.add_marker(pytest.mark.browser)
