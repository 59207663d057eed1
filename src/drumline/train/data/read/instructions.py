"""Instructions as JSONL: only the responses are trained on.

    {"prompt": "2 + 2?", "response": "4"}
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

A tokenizer with a chat template writes conversations by it, or by one that data.chat_template names. Without one, a
prompt is followed by its response and the token that ends a text, and each message of a conversation is a line:
`user: ...`. An adapter is trained beside a model that has learned its own template, so there a missing one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from drumline.core.errors import UsageError
from drumline.train.config.files.data_files import existing_files, records_of
from drumline.train.data.items.documents import Documents
from drumline.train.data.items.unready import Unready
from drumline.train.models.built import Tokenizer
from drumline.train.models.chat_templates import PLAIN, TEMPLATES, template_named
from drumline.train.models.tokenizers import FolderTokenizer, Message

_FORMS = '{"prompt": "...", "response": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}'
_ANSWERS = "assistant"
Counted = tuple[list[int], list[bool]]


def instruction_documents(
    names: Sequence[str], tokenizer: Tokenizer, *, key: str = "data.files", template: str = "", strict: bool = False
) -> Documents:
    """Return the documents of instruction files, with which of their tokens are trained on.

    `template` is what data.chat_template says; with `strict`, a tokenizer without one is refused where it is "".
    """
    if not names:
        raise UsageError(f"{key} names no file", expected=f"JSONL files, a line each: {_FORMS}")
    writer = _writer(tokenizer, template, strict=strict)
    tokens: list[list[int]] = []
    counted: list[list[bool]] = []
    for path in existing_files(names, key=key):
        for place, record in records_of(path):
            row, counts = _encoded(place, record, tokenizer, writer)
            if not any(counts[1:]):
                raise UsageError(f"{place}: the response is empty", expected="something to train on")
            tokens.append(row)
            counted.append(counts)
    part = np.array([number for each in tokens for number in each], dtype=np.int32)
    flags = np.array([flag for each in counted for flag in each], dtype=bool)
    bounds = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    return Documents.spans((part,), [bounds], counted=(flags,))


@dataclass(frozen=True, slots=True)
class _Writer:
    """A tokenizer that writes conversations by a template: its own, or the one given."""

    tokenizer: FolderTokenizer
    template: str = ""

    def chat(self, place: str, messages: Sequence[Message], *, answer: bool = False) -> list[int]:
        """Return the tokens of a conversation, up to where the next answer begins if asked for."""
        with _template_errors(place):
            return self.tokenizer.chat(messages, answer=answer, template=self.template)

    def marked(self, place: str, messages: Sequence[Message]) -> Counted | None:
        """Return the tokens and which of them are answers, if the template says so itself."""
        with _template_errors(place):
            return self.tokenizer.marked_chat(messages, self.template)


@contextmanager
def _template_errors(place: str) -> Iterator[None]:
    """Raise what a template refuses with the place of the conversation."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise UsageError(
            f"{place}: the chat template cannot write it: {reason}",
            expected="messages as the template takes them",
            fix="change the messages, or name another template in data.chat_template",
        ) from error


def _writer(tokenizer: Tokenizer, template: str, *, strict: bool) -> _Writer | None:
    """Return what writes conversations; None if they are written as plain lines."""
    if template == PLAIN:
        return None
    named = template_named(template)
    if isinstance(tokenizer, FolderTokenizer) and (named or tokenizer.has_chat_template):
        return _Writer(tokenizer, named)
    where = (
        f"the tokenizer of {tokenizer.folder}" if isinstance(tokenizer, FolderTokenizer) else 'the tokenizer "bytes"'
    )
    if named:
        raise UsageError(
            f"data.chat_template is {template!r:.80}, and {where} does not know templates",
            expected="a folder with a tokenizer in data.tokenizer",
        )
    if strict:
        raise Unready(
            f"data.chat_template is not set, and {where} has no chat template",
            expected="how the model was taught to read chats",
            fix=f"name a file with its Jinja template, {', '.join(TEMPLATES)}, or {PLAIN} for lines like user: ...",
        )
    return None


def _encoded(place: str, record: dict[str, Any], tokenizer: Tokenizer, writer: _Writer | None) -> Counted:
    if "messages" in record:
        messages = _messages(place, record["messages"])
    else:
        prompt, response = record.get("prompt"), record.get("response")
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise UsageError(f"{place}: the keys are {', '.join(map(str, record))[:120]}", expected=_FORMS)
        if writer is None:
            return _in_turn([(prompt, False), (response, bool(response))], tokenizer)
        messages = [{"role": "user", "content": prompt}, {"role": _ANSWERS, "content": response}]
    if not any(message["role"] == _ANSWERS and message["content"] for message in messages):
        raise UsageError(f"{place}: no message of the role {_ANSWERS!r} has content", expected=_FORMS)
    if writer is not None:
        return _by_template(place, messages, writer)
    turns: list[tuple[str, bool]] = []
    for message in messages:
        turns += [(f"{message['role']}: ", False), (f"{message['content']}\n", message["role"] == _ANSWERS)]
    return _in_turn(turns, tokenizer)


def _messages(place: str, messages: Any) -> list[Message]:
    def is_right(entry: Any) -> bool:
        return isinstance(entry, dict) and isinstance(entry.get("role"), str) and isinstance(entry.get("content"), str)

    if not isinstance(messages, list) or not messages or not all(map(is_right, messages)):
        raise UsageError(f"{place}: messages is {messages!r:.80}", expected=_FORMS)
    return messages


def _in_turn(turns: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> Counted:
    go_on = getattr(tokenizer, "encode_next", tokenizer.encode)
    tokens: list[int] = []
    counts: list[bool] = []
    for at, (text, counted) in enumerate(turns):
        more = (go_on if at else tokenizer.encode)(text)
        tokens += more
        counts += [counted] * len(more)
    return [*tokens, tokenizer.end], [*counts, counts[-1] if counts else False]


def _by_template(place: str, messages: list[Message], writer: _Writer) -> Counted:
    """Count what the template marks as answers, or else writes between the beginning of an answer and its end."""
    if (marked := writer.marked(place, messages)) is not None:
        return marked
    tokens = writer.chat(place, messages)
    counts = [False] * len(tokens)
    for at, message in enumerate(messages):
        if message["role"] != _ANSWERS:
            continue
        before, after = writer.chat(place, messages[:at], answer=True), writer.chat(place, messages[: at + 1])
        if tokens[: len(after)] != after or after[: len(before)] != before:
            raise UsageError(
                f"{place}: the chat template writes message {at + 1} differently when others follow it",
                expected="a template that only adds to what it has written",
                fix="give each response its own line, with the messages before it",
            )
        counts[len(before) : len(after)] = [True] * (len(after) - len(before))
    return tokens, counts
