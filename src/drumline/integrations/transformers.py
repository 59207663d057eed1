"""The `Trainer` of transformers on a pipeline: replace its import, and pass `pipeline=`."""

from __future__ import annotations

import transformers

from drumline.integrations.trainer import PipelineTrainer


class Trainer(PipelineTrainer, transformers.Trainer):
    """`transformers.Trainer`, whose steps run on a pipeline; `pipeline` has the settings of `dl.Pipeline`.

    Start the script by torchrun, or its function by `dl.launch`: each process is a rank. Here two take turns in one.

    >>> from tempfile import mkdtemp
    >>> sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes))
    >>> args = transformers.TrainingArguments(
    ...     mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, logging_steps=1,
    ...     save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    ... )
    >>> rows = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]} for _ in range(8)]
    >>> settings = {"schedule": "zb-h1", "num_ranks": 2, "transport": "in-process"}
    >>> trainer = Trainer(model, args, train_dataset=rows, pipeline=settings)
    >>> trainer.remove_callback(transformers.PrinterCallback)
    >>> trainer.train().global_step
    2
    >>> [name for name in trainer.state.log_history[0] if "pipeline" in name][0]
    'pipeline_bubble'
    """
