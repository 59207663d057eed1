"""Windows of one browser that tests use again and again: a new context costs five times as much as another page in one.

    shown = windows.open(address, "html[data-painted-ms]", viewport={"width": 390, "height": 800})
    shown.page.keyboard.press("Tab")
    assert shown.troubles == []          # of this page alone; so are its requests

Pages that a test opens stand beside each other, each in a window of its own. Options other than size, theme and motion
need a context of their own.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

USUAL = {"width": 1280, "height": 900}


@dataclass
class Window:
    """A page in the browser, what it complained of, and what it asked for."""

    page: Any
    address: str = ""
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", lambda message: self.troubles.append(f"{message.type}: {message.text}"))
        self.page.on("dialog", self._refuse)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _refuse(self, dialog: Any) -> None:
        self.troubles.append("a dialog opened")
        dialog.dismiss()

    def renew(self, viewport: dict[str, int], color_scheme: str, reduced_motion: str) -> None:
        """Make it as a new one: empty, of its first size, in its own theme, the mouse in a corner."""
        self.page.unroute_all()
        self.page.goto("about:blank")
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        self.page.mouse.move(0, 0)
        self.troubles.clear()
        self.requests.clear()


class Windows:
    """All windows of a browser."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._made: dict[tuple[str, int], Window] = {}
        self._used: Counter[str] = Counter()

    def begin(self) -> None:
        """Let a test use every window."""
        self._used.clear()

    def open(self, address: str, ready: str = "", **options: Any) -> Window:
        """Open a page and wait for an element that says it is ready; options are those of a context."""
        size = options.pop("viewport", USUAL)
        media = {"color_scheme": "light", "reduced_motion": "no-preference"}
        media |= {name: options.pop(name) for name in media if name in options}
        name = json.dumps(options, sort_keys=True)
        key = name, self._used[name]
        self._used[name] += 1
        if key not in self._made:
            self._made[key] = Window(self._browser.new_context(**options).new_page())
        window = self._made[key]
        window.renew(size, **media)
        window.address = address
        window.page.goto(address)
        if ready:
            window.page.wait_for_selector(ready)
        return window
