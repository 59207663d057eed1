"""All bugs that `planted.py` plants."""

from __future__ import annotations

from planted_adapt import ADAPT
from planted_axes import AXES
from planted_calibrated import CALIBRATED
from planted_calls import CALLS
from planted_core import CORE
from planted_followed import FOLLOWED
from planted_losses import LOSSES
from planted_pipeline import PIPELINE
from planted_plan import PLAN
from planted_proof import PROOF
from planted_report import REPORT
from planted_runtime import RUNTIME
from planted_saving import SAVING
from planted_schedules import SCHEDULES
from planted_serve import SERVE
from planted_slices import SLICES
from planted_slices_auto import SLICES_AUTO
from planted_slices_search import SLICES_SEARCH
from planted_state import STATE
from planted_stream import STREAM
from planted_train import TRAIN
from planted_tune import TUNE

BUGS = (
    *CORE,
    *PROOF,
    *SCHEDULES,
    *PLAN,
    *CALIBRATED,
    *REPORT,
    *RUNTIME,
    *FOLLOWED,
    *LOSSES,
    *AXES,
    *ADAPT,
    *PIPELINE,
    *CALLS,
    *SAVING,
    *SLICES,
    *SLICES_AUTO,
    *SLICES_SEARCH,
    *STATE,
    *STREAM,
    *SERVE,
    *TRAIN,
    *TUNE,
)
