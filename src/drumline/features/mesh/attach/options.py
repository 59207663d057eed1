"""The options of meshes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from drumline.channel.lines import grid
from drumline.core.errors import UsageError
from drumline.engine.options import SWITCH, Accepted, FeatureOptions, is_whole, option
from drumline.features.mesh import sequences
from drumline.model.layers import styles

_NOT_COMPILED = {
    "cp": "compiled attention would see a part of the sequence only",
    "ep": "exchanges of tokens are not part of compiled code",
    "tp": "exchanges inside divided layers are not part of compiled code",
}
_ZERO = Accepted(
    lambda one: all(
        is_whole(each) and each in (0, 1, 3) for each in (one.values() if isinstance(one, Mapping) else [one])
    ),
    "0 (nothing is divided), 1 (optimizer state) or 3 (parameters and gradients too), or a dict of these by stage",
)


@dataclass(frozen=True, kw_only=True)
class MeshOptions(FeatureOptions):
    """`mesh`: several pipelines side by side; `zero`, `tensor_parallel`, `sequence_parallel`: what they divide."""

    mesh: Mapping[str, int] | DeviceMesh | None = None
    zero: int | Mapping[int, int] = option(0, _ZERO)
    tensor_parallel: Mapping[str, Any] | None = None
    sequence_parallel: bool = option(False, SWITCH)

    @property
    def lines(self) -> Mapping[str, int] | DeviceMesh | None:
        """How ranks form several lines."""
        return self.mesh

    def check_together(self, others: Mapping[str, Any]) -> None:
        """Refuse what does not go together with several lines."""
        super().check_together(others)
        sizes = {} if self.mesh is None else grid.described(self.mesh)[0]
        if self.zero and sizes.get("dp", 1) == 1:
            raise UsageError(
                f"zero is {self.zero}, and the mesh has no dp",
                expected="data-parallel lines that can divide state",
                fix='pass mesh={"pp": ..., "dp": ...}, or zero=0',
            )
        if sizes.get("cp", 1) > 1:
            sequences.positions_of(others["model"])
        for axis, why in _NOT_COMPILED.items():
            if others["compile"] and sizes.get(axis, 1) > 1:
                raise UsageError(
                    f"compile is {others['compile']!r:.40} and the mesh is {grid.shown(sizes)}",
                    expected=f"compile=False with {axis}: {why}",
                )
        if sizes.get("tp", 1) > 1:
            styles.Plan.of(self.tensor_parallel, others["model"])
        elif self.sequence_parallel:
            raise UsageError(
                "sequence_parallel is True, and the mesh has no tp",
                expected="tensor-parallel lines, which divide the tokens between their layers",
                fix='pass mesh={"pp": ..., "tp": ...}, or sequence_parallel=False',
            )
