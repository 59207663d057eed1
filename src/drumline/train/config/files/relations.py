"""What must be there: files of data, tokenizers, models, and functions that can be called as the config says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from drumline.core.errors import DrumlineError
from drumline.core.files import is_regular, unreadable
from drumline.train.config.files.data_files import matched, wrong_file
from drumline.train.config.files.model_folder import problems_of
from drumline.train.config.files.signatures import refusals
from drumline.train.config.functions import parts_of
from drumline.train.config.problems import Problem
from drumline.train.config.relations import PlacedSettings, relation


@relation("data.files", "data.validation_files", "data.tokenizer", "data.kind", "data.chat_template")
def _files_are_there(judged: PlacedSettings) -> Iterator[Problem]:
    data = judged.settings.data
    for name in ("files", "validation_files"):
        for at, file in enumerate(getattr(data, name)):
            for problem in (wrong for path in matched(file) if (wrong := wrong_file(path, f"data.{name}"))):
                yield replace(problem, where=judged.source.where(("data", name, at)))
    if data.tokenizer not in ("", "bytes") and not os.path.isdir(data.tokenizer):
        why = "is a file" if is_regular(data.tokenizer) else unreadable(data.tokenizer).replace("file", "folder")
        yield judged.problem("data.tokenizer", f"{data.tokenizer}: {why}", '"bytes", or a tokenizer\'s folder')
    if data.chat_template not in ("", "chatml", "plain") and (why := unreadable(data.chat_template)):
        expected = "chatml, plain, or a file with a Jinja template"
        yield judged.problem("data.chat_template", f"{data.chat_template[:120]}: {why}", expected)
    if data.kind in ("tokens", "instructions") and not data.files:
        yield judged.problem("data.files", "is empty", f"files with {data.kind}: only text is shipped with Drumline")


@relation("model.kind", "model.path", "model.pretrained")
def _model_is_there(judged: PlacedSettings) -> Iterator[Problem]:
    model = judged.settings.model
    if model.kind != "hf":
        return
    if not model.path:
        yield judged.problem("model.path", "is missing", "a Hugging Face model's folder, or its config.json")
        return
    config = os.path.join(model.path, "config.json") if os.path.isdir(model.path) else model.path
    if why := unreadable(config):
        what = "has no config.json" if os.path.isdir(model.path) and why == "no such file" else why
        what = "no such file or folder" if what == "no such file" else what
        yield judged.problem("model.path", f"{model.path}: {what}", "a folder with a config.json, or that file")
        return
    for error, expected in problems_of(model.path, config, weights=model.pretrained):
        yield judged.problem("model.path", error, expected)


@relation("model.kind", "model.function", "model.arguments")
def _model_function_takes(judged: PlacedSettings) -> Iterator[Problem]:
    model = judged.settings.model
    if model.kind == "function":
        yield from _function(judged, "model", model.function, model.arguments)


@relation("data.kind", "data.function", "data.arguments")
def _data_function_takes(judged: PlacedSettings) -> Iterator[Problem]:
    data = judged.settings.data
    if data.kind == "function":
        yield from _function(judged, "data", data.function, data.arguments)


def _function(judged: PlacedSettings, table: str, name: str, arguments: dict[str, object]) -> Iterator[Problem]:
    try:
        parts_of(name)
    except DrumlineError as error:
        yield judged.problem(f"{table}.function", error.error if name else "is missing", error.expected, error.fix)
    else:
        yield from map(judged.placed, refusals(name, table, arguments))
