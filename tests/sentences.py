"""Splits prose into sentences and counts their words: pages, docstrings, comments, and texts that users read.

A sentence ends at a full stop, a question mark or an exclamation mark that a space or the end of the paragraph follows,
outside of code. Each cell of a table, each item of a list with bullets and each heading starts afresh. A link counts by
its text, and code between backticks counts as one word.

A sentence with two or more semicolons is a list: each item counts on its own, so a list may be long, but none of its
items may. Code separated by commas counts as one word too, so that a list of names is not a long sentence.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from syntax import documented

_CODE = "\N{OBJECT REPLACEMENT CHARACTER}"
_BREAKS = ("#", "!", "<", "|", ">", "---", "===", ":::", "$$", ".. ")
_BULLET = re.compile(r"(?:[-*+]|\d+[.)])\s+")
_ABBREVIATIONS = re.compile(r"\b(?:e\.g|i\.e|etc|cf|vs|al|No|Fig|Sec|approx)\.$")


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph where a full stop, a question mark or an exclamation mark ends a sentence.

    >>> sentences("See [the docs](docs/index.md). Run `a. b` in 0.5 s: done! Ends here.")
    ['See the docs.', 'Run `a. b` in 0.5 s: done!', 'Ends here.']
    """
    text = re.sub(r"!?\[((?:`[^`]*`|[^\]`])*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->", "", paragraph))
    code: list[str] = []

    def hide(match: re.Match[str]) -> str:
        code.append(match[0])
        return _CODE

    text = re.sub(r"``[^`]+``|`[^`]*`", hide, text)
    found: list[str] = []
    for part in re.split(r"(?<=[.?!])[\"')*_]*\s+|(?<=[.?!][\"')*_])\s+", text):
        if found and _ABBREVIATIONS.search(found[-1]):
            found[-1] += " " + part
        elif part:
            found.append(part)
    rest = iter(code)
    return [re.sub(_CODE, lambda _: next(rest), sentence) for sentence in found]


def words(sentence: str) -> int:
    """Return how many words the longest part of a sentence has that is no list; code counts as one word.

    >>> words("Run `drumline show 1f1b` twice.")
    3
    >>> words("It takes a name; a number of ranks; a file.")
    4
    >>> words("It takes a name; a number of ranks.")
    8
    >>> words("One of `a`, `b`, `c` and `d`.")
    3
    """
    text = re.sub(r"``[^`]+``|`[^`]*`", _CODE, sentence)
    text = re.sub(rf"{_CODE}(?:(?:, | and | or |, and |, or ){_CODE})+", _CODE, text)
    items = text.split(";")
    return max(len(re.findall(rf"[\w{_CODE}]\S*", item)) for item in ([text] if len(items) < 3 else items))


def longer(paragraphs: Iterable[tuple[int, str]], bound: int) -> list[str]:
    """Return the sentences over the bound, each with the line on which its paragraph starts and its words.

    >>> longer([(3, "One two three. Four five."), (9, "Six.")], 2)
    ['3: 3 words: One two three.']
    """
    return [
        f"{line}: {words(sentence)} words: {sentence}"
        for line, paragraph in paragraphs
        if len(paragraph.split()) > bound  # no sentence has more, and most paragraphs have less
        for sentence in sentences(paragraph)
        if words(sentence) > bound
    ]


def page(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, items of lists, and cells of tables of a page, each with its line.

    >>> list(page("# Title\\n\\nOne\\ntwo.\\n- three\\n  four\\n```sh\\nmake\\n```\\n| a | `b|c` |\\n"))
    [(1, 'Title'), (3, 'One two.'), (5, 'three four'), (10, 'a'), (10, '`b|c`')]
    """
    fence, start, held = "", 0, ""
    for at, raw in enumerate([*text.split("\n"), ""], first):
        line = raw.strip()
        opens = re.match(r"(```+|~~~+|:::+)", line)
        if fence:
            if opens and line.startswith(fence) and not line.strip(fence[0]):
                fence = ""
            continue
        bullet = _BULLET.match(line)
        if held and (opens or not line or bullet or line.startswith(_BREAKS)):
            yield start, held
            held = ""
        if opens:
            fence = opens[1]
        elif line.startswith("|"):
            cells = re.sub(r"`[^`]*`", lambda code: code[0].replace("|", "\0"), line).replace("\\|", "\0").split("|")
            yield from ((at, cell.strip().replace("\0", "|")) for cell in cells if re.search(r"[^\s:-]", cell))
        elif line.startswith("#"):
            yield at, line.lstrip("# ")
        elif line and not line.startswith(("---", "===", "$$", "<!--")):
            start = start if held else at
            held = f"{held} {line[bullet.end() :] if bullet else line.lstrip('> ')}".strip()


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of the docstrings in a module, without examples and what is set in by four spaces.

    >>> list(docstrings("'What it is.\\\\n\\\\n>>> 1\\\\n1\\\\n\\\\nAnd what else.'"))
    [(1, 'What it is.'), (1, 'And what else.')]
    """
    for node in documented(ast.parse(source)):
        text = re.sub(r"^ *>>> .*(?:\n.*\S.*)*|^ {4}.*", "", ast.get_docstring(node) or "", flags=re.MULTILINE)
        yield from ((node.body[0].lineno, paragraph) for _, paragraph in page(text))


def comments(source: str, above: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the comments of a module; lines that follow each other are one.

    A module none of whose comments may have more words than `above` is not read token by token, which takes long.

    >>> list(comments("# One\\n# two.\\nx = 1  # three\\n"))
    [(1, 'One two.'), (3, 'three')]
    """
    if most_commented(source) <= above:
        return
    held: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        text = token.string.lstrip("#: ")
        if held and held[-1][:2] == (line - 1, column) and not token.line[:column].strip():
            held.append((line, column, text))
            continue
        if held:
            yield held[0][0], " ".join(text for _, _, text in held)
        held = [(line, column, text)]
    if held:
        yield held[0][0], " ".join(text for _, _, text in held)


def most_commented(source: str) -> int:
    """Return how many words may follow signs of comments on lines that follow each other, strings counted as well.

    >>> most_commented("# One\\n# two.\\nx = 1\\nx = '#'  # three\\n")
    3
    """
    most = count = 0
    for line in source.split("\n"):
        count = count + len(line.partition("#")[2].split()) if "#" in line else 0
        most = max(most, count)
    return most


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module that are no docstrings: errors, help, reports. What is in braces counts as code.

    >>> list(texts("'Docstring.'\\nraise ValueError(f'M is {m}: ' + 'too small')"))
    [(2, 'M is `...`:'), (2, 'too small')]
    """
    tree, done = ast.parse(source), set[int]()
    for node in ast.walk(tree):  # a whole comes before its parts
        if id(node) in done:
            continue
        if isinstance(node, ast.Expr):
            done.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            done.update(id(part) for part in node.values if isinstance(part, ast.Constant))
            parts = [str(part.value) if isinstance(part, ast.Constant) else "`...`" for part in node.values]
            yield from page("".join(parts), node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from page(node.value, node.lineno)
