"""In which line of a TOML file each key stands. The standard library's parser reads TOML and tells nothing of lines.

    [optimizer]                     ("optimizer",)                            1
    settings = { betas = [0.9,      ("optimizer", "settings"), (..., "betas") 2
                          0.95] }   (..., "betas", 1)                         3
    [[optimizer.groups]]            ("optimizer", "groups", 0)                5

The text has been parsed before, so that it is known to be TOML: whatever is no string, list or table ends where a
comma, a bracket, a comment or the line does.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN = re.compile(r"[^,\]}#\n]*")
_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)


def lines_of(text: str) -> dict[Path, int]:
    r"""Return the line of every table, key and item, the first line being 1; of a key that stands twice, the first.

    >>> lines_of("version = 1\n[batch]\nsequences = 8")
    {('version',): 1, ('batch',): 2, ('batch', 'sequences'): 3}
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.found


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.line = 1
        self.counted_to = 0
        self.found: dict[Path, int] = {}
        self.items: dict[Path, int] = {}  # how many tables an array of tables has so far

    def document(self) -> None:
        table: Path = ()
        self.skip(_BLANK)
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                self.at += 2
                names = self.key()
                home = (*self.resolved(names[:-1]), names[-1])
                self.note(home)
                table = (*home, self.items.get(home, 0))
                self.items[home] = self.items.get(home, 0) + 1
                self.note(table)
                self.at = self.text.index("]]", self.at) + 2
            elif self.text[self.at] == "[":
                self.at += 1
                table = self.resolved(self.key())
                self.note(table)
                self.at = self.text.index("]", self.at) + 1
            else:
                self.pair(table)
            self.skip(_BLANK)

    def resolved(self, names: list[str]) -> Path:
        """Return the path that a header means: of an array of tables, its last one."""
        path: Path = ()
        for name in names:
            path = (*path, name)
            if path in self.items:
                path = (*path, self.items[path] - 1)
        return path

    def pair(self, table: Path) -> None:
        path = table
        for name in self.key():
            path = (*path, name)
            self.note(path)
        self.at = self.text.index("=", self.at) + 1
        self.skip(_SPACE)
        self.value(path)

    def value(self, path: Path) -> None:
        start = self.text[self.at]
        if start in "\"'":
            self.string()
        elif start == "[":
            self.inside("]", path)
        elif start == "{":
            self.inside("}", path)
        else:
            self.skip(_PLAIN)

    def inside(self, end: str, path: Path) -> None:
        """Go through a list, or a table within a line."""
        self.at += 1
        index = 0
        while True:
            self.skip(_BLANK)
            if self.text[self.at] == end:
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
            elif end == "]":
                self.note((*path, index))
                self.value((*path, index))
                index += 1
            else:
                self.pair(path)

    def key(self) -> list[str]:
        """Read a key, which may have parts with dots between."""
        names = []
        while True:
            self.skip(_SPACE)
            if self.text[self.at] in "\"'":
                names.append(self.string())
            else:
                found = _BARE.match(self.text, self.at)
                assert found is not None, "the text is TOML"
                names.append(found.group())
                self.at = found.end()
            self.skip(_SPACE)
            if self.text[self.at] != ".":
                return names
            self.at += 1

    def string(self) -> str:
        """Read a string of any kind; the value matters for keys alone, which stand in one line."""
        quote = self.text[self.at]
        wide = self.text.startswith(quote * 3, self.at)
        start = self.at + (3 if wide else 1)
        end, ending = start, quote * (3 if wide else 1)
        while not self.text.startswith(ending, end):
            end += 2 if quote == '"' and self.text[end] == "\\" else 1
        while wide and self.text.startswith(quote, end + 3):  # up to two quotes may stand before the three that end it
            end += 1
        self.at = end + len(ending)
        inner = self.text[start:end]
        return _ESCAPE.sub(_escaped, inner) if quote == '"' else inner

    def note(self, path: Path) -> None:
        self.line += self.text.count("\n", self.counted_to, self.at)
        self.counted_to = self.at
        self.found.setdefault(path, self.line)

    def skip(self, what: re.Pattern[str]) -> None:
        found = what.match(self.text, self.at)
        assert found is not None, "patterns that match nothing, too"
        self.at = found.end()


def _escaped(found: re.Match[str]) -> str:
    four, eight, name = found.groups()
    return chr(int(four or eight, 16)) if name is None else _ESCAPES.get(name, name)
