"""What does not go with layers that move."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, call, fact
from drumline.engine.together import AFTER, NO_FLUSH

_STAYS = {
    NO_FLUSH: "layers can move only if no microbatch is in flight",
    AFTER: "copies of updates that may be undone do not move",
    fact("zero", 3): "pieces of divided parameters cannot move",
}
CLASHES = tuple(Clash(call("repartition"), other, "layers that stay", why) for other, why in _STAYS.items())
