"""The page of a cluster plan in a browser: it draws, asks for nothing, and fits a narrow window."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser.windows import Windows
from cluster_models import GIB, Rough, small_cluster, small_transformer
from drumline.plan.layouts.explain import explain
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import plan
from drumline.report.plan.page import plan_page


@pytest.mark.parametrize("pipeline", [1, 2])
def test_page_draws_without_errors_and_requests(windows: Windows, tmp_path: Path, pipeline: int) -> None:
    machines = small_cluster(memory=1.2 * GIB)
    found = plan(small_transformer(), machines, batch=32, surveyed=Rough().surveyed, pins=Pins(pipeline=pipeline))
    told = explain(found)
    assert told.reasons is not None
    path = tmp_path / "plan.html"
    path.write_text(plan_page(told, told.reasons))
    shown = windows.open(path.as_uri(), viewport={"width": 420, "height": 800})
    page = shown.page
    assert page.locator(".plan .bar").count() == 2 * len(found.best)
    assert page.locator(".toolbar").is_visible() == (pipeline > 1)
    assert page.locator(".chart .plot").count() == (1 if pipeline > 1 else 0)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert (shown.requests, shown.troubles) == ([path.as_uri()], [])
