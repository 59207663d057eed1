"""What does not go with layers that move."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, called, given
from drumline.engine.together import AFTER, NO_FLUSH, axis

_MOVE = called("repartition")
CLASHES = (
    Clash(_MOVE, NO_FLUSH, "a flushed schedule", "between its steps no microbatch is in flight"),
    Clash(_MOVE, AFTER, "updates that are validated before", "copies of those that may be taken back do not move"),
    Clash(_MOVE, axis("tp", "ep"), "a mesh of pp, dp and cp", "parts of layers and experts cannot move"),
    Clash(_MOVE, given("zero"), "state that is not divided", "pieces cannot move"),
)
