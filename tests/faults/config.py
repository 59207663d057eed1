"""The runs into which faults are injected: small, with checkpoints often, on the model and the data of user.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MESHES = {
    "": "",
    "tp": "tensor = 2",
    "ep": "data = 2\nexpert = 2",
    "zero 1": "data = 2\n[memory]\nzero = 1",
    "zero 3": "data = 2\n[memory]\nzero = 3",
}
LENGTH = 16  # tokens of a sequence, in runs that read sequences
USER = Path(__file__).with_name("user.py")


@dataclass(frozen=True)
class Config:
    """What differs between runs; those of equal value have one uninterrupted run to be held against."""

    ranks: int = 2
    lines: str = ""  # what two lines of a mesh divide, if anything: "tp", "ep", "zero 1" or "zero 3"
    schedule: str = "1f1b"
    slices: int = 1  # of sequences; with more than one the model reads sequences
    width: int = 64  # checkpoints are larger than anything else that a run writes
    dropout: float = 0.0
    nan_at: int = -1  # the batch of an epoch that holds a NaN
    steps: int = 12
    every: int = 3
    keep: int = 3
    timeout: float = 30.0

    def text(self) -> str:
        """Return it as a file for `drumline train`."""
        return f"""format = "drumline-train"
version = 1

[model]
kind = "function"
function = "{USER}:build_model"
arguments = {{ width = {self.width}, dropout = {self.dropout}, lines = "{self.lines}"{self._reads} }}

[data]
kind = "function"
function = "{USER}:build_data"
arguments = {{ width = {self.width}, nan_at = {self.nan_at}{self._reads} }}

[batch]
sequences = 16
microbatch = 4
sequence = {LENGTH}

[mesh]
pipeline = {self.ranks}
{_MESHES[self.lines]}

[pipeline]
schedule = "{self.schedule}"
slices = {self.slices}
device = "cpu"
timeout = {self.timeout}

[optimizer]
kind = "AdamW"
lr = 0.01
clip_norm = 1.0

[learning_rate]
shape = "cosine"
warmup_steps = 4
final = 0.1

[evaluation]
every = 0

[checkpoint]
every = {self.every}
keep = {self.keep}

[run]
steps = {self.steps}
threads = 1
"""

    @property
    def _reads(self) -> str:
        return ", reads = true" if self.slices > 1 else ""
