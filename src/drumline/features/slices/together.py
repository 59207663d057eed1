"""What does not go with slices of sequences."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, Given, call, fact
from drumline.engine.together import NAMED_PROGRAM, NO_FLUSH, TWO_COPIES, axis

_SLICED = Given("slices", "`slices`", lambda facts: facts.get("slices", 1) > 1, "slices is {slices}")
_NOT = ("slices", 1)
_WHY = {
    NO_FLUSH: "steps of endless rows are cut where forwards of a microbatch begin",
    TWO_COPIES: "slices of one microbatch would be on different ranks",
    axis("cp", "tp", "ep"): "lines of a mesh see parts of sequences or layers in one piece",
    NAMED_PROGRAM: "a program says nothing of slices yet",
    fact("programs"): "a program says nothing of slices yet",
    fact("adapt"): "slices are not moved with layers yet",
    fact("arrange"): "slices have one order",
    fact("capture"): "every slice has other keys and values",
    fact("compile"): "attention of compiled blocks is not seen",
    call("take_program"): "a program says nothing of slices yet",
    call("search"): "no search knows slices yet",
    call("repartition"): "slices are not moved with layers yet",
}
CLASHES = tuple(Clash(other, _SLICED, "one of the two", why, _NOT) for other, why in _WHY.items())
