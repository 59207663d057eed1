"""The `Trainer` of transformers on a pipeline: replace its import, and pass `pipeline=`."""

from __future__ import annotations

import transformers

from drumline.integrations.trainer import PipelineTrainer


class Trainer(PipelineTrainer, transformers.Trainer):
    """`transformers.Trainer`, whose steps run on a pipeline; `pipeline` has the settings of `dl.Pipeline`."""
