"""How a conversation is written for a model: by its tokenizer's template, by one that is named, or as plain lines.

With "chatml" each message stands between <|im_start|> with its role and <|im_end|>; with "plain" it is a line like
`user: 2 + 2?`.
"""

from __future__ import annotations

from pathlib import Path

from drumline.core.errors import UsageError, nearest
from drumline.core.files import MIB, FileKind, is_regular, read_text

PLAIN = "plain"
TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
}
_KIND = FileKind("chat template", UsageError, "a Jinja template, as tokenizers have it", MIB)


def template_named(name: str) -> str:
    """Return the template of a name or a file; "" for the tokenizer's own.

    >>> template_named("chatml")[:30], template_named("")
    ('{% for message in messages %}{', '')
    >>> template_named("chatmm")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: data.chat_template is 'chatmm', and there is no such file; expected ...
    """
    if not name or name in TEMPLATES:
        return TEMPLATES.get(name, "")
    if not is_regular(Path(name)):
        raise UsageError(
            f"data.chat_template is {name[:80]!r}, and there is no such file",
            expected=f"{', '.join(TEMPLATES)}, {PLAIN}, or a file with a Jinja template",
            fix=nearest(name[:60], [*TEMPLATES, PLAIN]),
        )
    return read_text(name, _KIND)
