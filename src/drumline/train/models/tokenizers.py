"""Text as token numbers: bytes, or the tokenizer of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drumline.core.errors import ModelError, UsageError, installing
from drumline.train.models.built import Tokenizer

BYTES = "bytes"
_MARK = "generation %}"
Message = dict[str, str]  # role, content


class ByteTokenizer:
    """The bytes of UTF-8, and one number more that ends a document.

    >>> value = ByteTokenizer()
    >>> value.encode("né"), value.decode([110, 195, 169, 256]), value.vocabulary
    ([110, 195, 169], 'né', 257)
    """

    vocabulary = 257
    end = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        """Return the text; bytes that are none are shown as �."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class FolderTokenizer:
    """The tokenizer of a local folder, with whatever it puts before a text (such as a token for its beginning)."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ModelError("the tokenizer of a folder needs transformers", fix=installing("hf")) from None
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(
                f"{folder} has no tokenizer that can be read: {_first_line(error)}",
                expected="tokenizer.json, or the files that AutoTokenizer reads",
                fix='name another folder in data.tokenizer, or "bytes"',
            ) from None
        end = self.inner.eos_token_id if self.inner.eos_token_id is not None else self.inner.sep_token_id
        if end is None:
            raise ModelError(
                f"the tokenizer of {folder} has no token that ends a text",
                expected="eos_token in tokenizer_config.json",
            )
        self.vocabulary = len(self.inner)
        self.end = int(end)
        self.folder = str(folder)

    def encode(self, text: str) -> list[int]:
        """Return the tokens, without the one that ends a text."""
        tokens: list[int] = self.inner(text, verbose=False)["input_ids"]
        return tokens[:-1] if tokens and tokens[-1] == self.end else tokens

    def encode_next(self, text: str) -> list[int]:
        """Return the tokens of a text that continues after another."""
        tokens: list[int] = self.inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Return the text."""
        return str(self.inner.decode(tokens, skip_special_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether it knows how to write a conversation."""
        return bool(getattr(self.inner, "chat_template", None))

    def chat(self, messages: Sequence[Message], *, answer: bool = False, template: str = "") -> list[int]:
        """Return the tokens of a conversation; with `answer`, up to where the next answer begins.

        It is written by the tokenizer's own template unless another one is given.
        """
        how: dict[str, Any] = {"chat_template": template or None, "add_generation_prompt": answer}
        return self.encode_next(self.inner.apply_chat_template(list(messages), tokenize=False, **how))

    def marked_chat(self, messages: Sequence[Message], template: str = "") -> tuple[list[int], list[bool]] | None:
        """Return the tokens of a conversation and which of them are answers; None if the template does not mark these.

        Templates mark them by `{% generation %}`, of which only fast tokenizers know the tokens.
        """
        if not self.inner.is_fast or _MARK not in (template or str(getattr(self.inner, "chat_template", ""))):
            return None
        how: dict[str, Any] = {"chat_template": template or None, "return_dict": True}
        result = self.inner.apply_chat_template(list(messages), tokenize=True, return_assistant_tokens_mask=True, **how)
        return list(result["input_ids"]), [bool(mark) for mark in result["assistant_masks"]]


def tokenizer_named(name: str) -> Tokenizer:
    """Return the tokenizer that a config names: "bytes" or a folder.

    >>> tokenizer_named("bytes").vocabulary
    257
    """
    if name == BYTES:
        return ByteTokenizer()
    if not Path(name).is_dir():
        expected = '"bytes", or a folder with a tokenizer'
        raise UsageError(f"data.tokenizer is {name!r:.80}, and there is no such folder", expected=expected)
    return FolderTokenizer(name)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds files of a tokenizer."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    return any((folder / name).is_file() for name in names)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
