"""All bugs that `planted.py` plants."""

from __future__ import annotations

from planted_adapt import ADAPT
from planted_core import CORE
from planted_followed import FOLLOWED
from planted_pipeline import PIPELINE
from planted_plan import PLAN
from planted_report import REPORT
from planted_runtime import RUNTIME
from planted_schedules import SCHEDULES

BUGS = (*CORE, *SCHEDULES, *PLAN, *REPORT, *RUNTIME, *FOLLOWED, *ADAPT, *PIPELINE)
