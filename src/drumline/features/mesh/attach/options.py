"""The options of meshes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from drumline.channel.lines.grid import described
from drumline.core.settings.rule import Rule
from drumline.engine.options import SWITCH, FeatureOptions, is_whole, option
from drumline.engine.together import mesh_facts
from drumline.features.mesh import sequences
from drumline.model.layers import styles
from drumline.runtime.sequences import positions_of

_ZERO = Rule(
    "0 (nothing is divided), 1 (optimizer state) or 3 (parameters and gradients too), or a dict of these by stage",
    lambda entry: all(
        is_whole(each) and each in (0, 1, 3) for each in (entry.values() if isinstance(entry, Mapping) else [entry])
    ),
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

    def facts(self) -> dict[str, Any]:
        """Return the sizes of the mesh, and what is divided: the most of any stage, and what of each."""
        by_stage = self.zero if isinstance(self.zero, Mapping) else {}
        most = max(by_stage.values(), default=0) if isinstance(self.zero, Mapping) else self.zero
        return super().facts() | mesh_facts(self._sizes) | {"zero": most, "zero_by_stage": by_stage}

    def refuse_model(self, model: Any) -> None:
        """Refuse a model whose sequences or layers cannot be divided."""
        super().refuse_model(model)
        if self._sizes.get("cp", 1) > 1:
            positions_of(model, sequences.BY_CP)
        if self._sizes.get("tp", 1) > 1:
            styles.StylePlan.of(self.tensor_parallel, model)

    @property
    def _sizes(self) -> dict[str, int]:
        return {} if self.mesh is None else described(self.mesh)[0]
