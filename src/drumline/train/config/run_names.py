"""Names of run folders: safe on every file system, in every shell, and never a way out of where runs belong."""

from __future__ import annotations

import os
import re

_UNSAFE = re.compile(r"[^\w.+=@-]+", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # names that Windows keeps to itself
_LONGEST = 100  # leaves room for what is added to it, below the 255 bytes of common file systems
EXPECTED = (
    f"a folder whose name has at most {_LONGEST} bytes, no control characters, no leading dash and no reserved word"
)


def safe_name(text: str) -> str:
    """Return a name for a folder that resembles a text.

    >>> safe_name("gpt"), safe_name("some/model v2"), safe_name("../../etc"), safe_name("-rf"), safe_name("nul.txt")
    ('gpt', 'some-model-v2', 'etc', 'rf', 'run-nul.txt')
    """
    name = _UNSAFE.sub("-", text).strip("-.")[:_LONGEST].rstrip("-.")
    return f"run-{name}" if not name or _RESERVED.fullmatch(name) else name


def problem_with(path: str) -> str:
    r"""Return what is wrong with the path of a run's folder, or an empty text; its last part is the run's name.

    >>> problem_with("runs/first"), problem_with("../runs/first")
    ('', '')
    >>> problem_with("runs/.."), problem_with("runs/-rf"), problem_with("runs/a\nb"), problem_with("NUL")
    ("is '..'", 'begins with a dash', 'has a control character', 'is a reserved word')
    """
    if _CONTROL.search(path):
        return "has a control character"
    if any(0xD800 <= ord(text) <= 0xDFFF for text in path):
        return "is not text in UTF-8"
    name = os.path.basename(path.rstrip(os.sep))
    if name == os.pardir:
        return "is '..'"
    if name.startswith("-"):
        return "begins with a dash"
    if _RESERVED.fullmatch(name):
        return "is a reserved word"
    if len(name.encode()) > _LONGEST:
        return f"has {len(name.encode())} bytes"
    return ""
