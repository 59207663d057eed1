"""Numbers with a unit in README and docs, and where each of them is from.

A comment directly behind a number says it, in pages that readers see rendered:

    41 to 55%<!-- search_runs/head -->   measured: `benchmarks/results.json` has the values under this key
    2%<!-- adapt/link - 1 -->            the same as a difference to 1; also `1 - KEY`, `1 / KEY` and `KEY / KEY`
    30 s<!-- setting -->                 a default, a limit, a bar, a threshold of the software
    67%<!-- counted -->                  follows from a formula, a definition, checked-in data, or counting
    50 GiB<!-- simulated -->             the simulator, the search or the planner computes it
    7.7%<!-- shown -->                   a block of the page prints it; `shown in PAGE` for another page's
    1.6 times<!-- assumed -->            an example, or an assumption of the software
    60 GB<!-- published: URL -->         somebody else's

One comment stands for all numbers of a list or a range that ends there: `6 s, 7 s and 8 s`. A comment on a line of its
own, `<!-- numbers: setting -->`, says it for what follows in its section. Right above a table it is for the table
alone, and may have a key: `<!-- numbers: KEY -->`; then its numbers without a unit count as well. A sentence that
sounds as if it told a measurement needs a comment of its own all the same. Code is left out, and so are numbers in
words but for times and durations.
`python tests/figures.py [PAGE ...]` lists the numbers that nothing is said of.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KINDS = {"setting", "counted", "simulated", "shown", "assumed", "published"}

SPELLED = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
DURATIONS = "milliseconds? microseconds? seconds? minutes? hours? days?"
NAMES = f"% percent ns us µs ms s {DURATIONS} [KMGT]i?B/s [KMGT]i?B bytes? [TG]FLOP/s times"
UNIT = rf"(?:\w+(?:/s|\s(?:a|per)\ssecond)|{'|'.join(NAMES.split())})(?![\w/])"
NUMBER = r"(?<![\w.,/#\-])[-+±~]?x?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
LAST = r"\s(?:to|and|or|against)\s"
BETWEEN = rf"(?:{LAST}|,\s(?:and\s|to\s|or\s)?)"
NUMBERS = rf"(?:{NUMBER}(?:(?:,\s{NUMBER})*{LAST}{NUMBER})?)"
WORDS = (
    rf"\b(?:{'|'.join(SPELLED)})\s(?:{'|'.join(DURATIONS.split())}|times(?=\0*\s(?:as|slower|faster|longer|shorter)\b))"
)
PHRASE = rf"(?:{NUMBERS}\s?{UNIT}|{WORDS}|(?<!\w)x\d+\.\d+|\b\d+\.\d+(?:{BETWEEN}\d+\.\d+)*(?=\0*\sof\s[a-z]))"
RUN = re.compile(rf"{PHRASE}(?:{BETWEEN}{PHRASE})*")

COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
CODE = re.compile(r"^```.*?^```$|(`+)(?!`).*?(?<!`)\1(?!`)|(?<=\])\([^)\s]*\)", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^\|.*\n\|[ :|-]+\|\n(?:\|.*\n?)*", re.MULTILINE)
SOUNDS_MEASURED = re.compile(r"\b(?:took|measured|median|medians|H200|aarch64|x86)\b")

SIZES = {"ns": "1e-9", "us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600", "day": "86400", "%": "0.01"}
SIZES |= {"times": "1", "B": "1"}
SIZES |= {f"{letter}B{rate}": f"1e{3 * at}" for at, letter in enumerate("KMGT", 1) for rate in ("", "/s")}
SIZES |= {f"{letter}iB{rate}": str(1024**at) for at, letter in enumerate("KMGT", 1) for rate in ("", "/s")}
SHORT = {"percent": "%", "µs": "us", "microsecond": "us", "millisecond": "ms", "second": "s", "minute": "min"}
SHORT |= {"hour": "h", "byte": "B", "": "times", "of": "times", "times": "times"}


def unit(word: str) -> str:
    """Return the short name of a unit.

    >>> unit("rows a second"), unit("rows per second"), unit("seconds"), unit("ms"), unit("MiB/s")
    ('rows/s', 'rows/s', 's', 'ms', 'MiB/s')
    """
    word = re.sub(r"\s(?:a|per)\ssecond$", "/s", word)
    return word if word in SIZES else SHORT.get(word) or SHORT.get(word.removesuffix("s")) or word


@dataclass(frozen=True)
class Number:
    """A number as a page shows it; in a table with a key it may have no unit."""

    text: str
    unit: str

    @property
    def value(self) -> Decimal:
        if self.text in SPELLED:
            return Decimal(2 + SPELLED.index(self.text))
        return Decimal(self.text.lstrip("±~x").replace(",", "").replace("+x", ""))

    def shows(self, value: Decimal, of: str) -> bool:
        """Say whether this is the value in its unit, rounded to the digits that the page shows.

        >>> Number("41", "%").shows(Decimal("41.3"), "%"), Number("-6", "%").shows(Decimal("6.4"), "%")
        (True, False)
        >>> Number("2", "%").shows(Decimal("0.021"), "times"), Number("0.53", "s").shows(Decimal("530"), "ms")
        (True, True)
        """
        if self.unit and ((of in SIZES) != (self.unit in SIZES) or (of not in SIZES and of != self.unit)):
            return False
        if self.unit in SIZES:
            value = value * Decimal(SIZES[of]) / Decimal(SIZES[self.unit])
        if self.text[0] not in "+-":
            value = abs(value)
        digits = Decimal(1).scaleb(self.value.as_tuple().exponent)  # type: ignore[arg-type]
        return self.value in {value.quantize(digits, way) for way in (ROUND_HALF_UP, ROUND_HALF_EVEN)}


@dataclass(frozen=True)
class Run:
    """Numbers that stand together, with the comment behind them or the one that is said for their section."""

    start: int
    line: int
    text: str
    numbers: tuple[Number, ...]
    said: str | None
    itself: bool
    sentence: str


def phrases(text: str, run: re.Match[str]) -> tuple[Number, ...]:
    """Return the numbers of a run, which is a match in the text.

    >>> text = "In 5 steps 8.1 to 16.6%, 3 s and four seconds later, 7 s"
    >>> [(number.text, number.unit) for number in phrases(text, RUN.search(text))]
    [('8.1', '%'), ('16.6', '%'), ('3', 's'), ('four', 's')]
    """
    found = []
    for match in re.compile(PHRASE).finditer(text, run.start()):
        if match.start() >= run.end():
            break
        own = re.findall(rf"{NUMBER}|{'|'.join(SPELLED)}", match[0])
        word = re.search(rf"(?:{UNIT})$", match[0])
        found += [Number(number, unit(word[0] if word else "")) for number in own]
    return tuple(found)


def blank(match: re.Match[str], by: str) -> str:
    return re.sub(r"[^\n]", by, match[0])


def declared(page: str) -> Iterator[tuple[int, int, str]]:
    """Yield what comments say for a stretch of the page: its start, its end, and what."""
    headings = [(match.start(), len(match[1])) for match in re.finditer(r"^(#+) ", page, re.MULTILINE)]
    for match in re.finditer(r"^<!--\s*numbers:\s*(.*?)\s*-->$", page, re.MULTILINE):
        if is_kind(match[1]) and not TABLE.match(page, match.end() + 1):
            level = max((at, level) for at, level in headings if at < match.start())[1]
            later = [at for at, other in headings if at > match.start() and other <= level]
            yield match.end(), min([*later, len(page)]), match[1]
        else:
            table = TABLE.search(page, match.end())
            assert table is not None, f"no table follows {match[0]}"
            assert not page[match.end() : table.start()].strip(), f"no table follows {match[0]}"
            yield table.start(), table.end(), match[1]


def is_kind(said: str) -> bool:
    return re.split(r"[: ]", said)[0] in KINDS


def columns(text: str, table: re.Match[str], *, bare: bool = False) -> Iterator[tuple[int, str, str]]:
    """Yield the cells that hold bare numbers under a unit, or all that hold bare ones: where, their text, the unit.

    >>> page = "| way | ms |  |\\n|---|---|---|\\n| ours | 12 | 3 |\\n"
    >>> list(columns(page, TABLE.search(page))), list(columns(page, TABLE.search(page), bare=True))
    ([(39, '12', 'ms')], [(39, '12', 'ms'), (44, '3', '')])
    """
    rows = table[0].splitlines(keepends=True)
    heads = [re.search(rf"(?<!\w){UNIT}", head) for head in re.split(r"(?<!\\)\|", rows[0])]
    at = table.start() + len(rows[0]) + len(rows[1])
    for row in rows[2:]:
        for head, cell in zip(heads, re.split(r"(?<!\\)\|", row), strict=False):
            inner = cell.split("\0")[0].strip()
            if (head or bare) and re.fullmatch(rf"{NUMBERS}|{NUMBER}(?:,\s{NUMBER})*", inner.replace("*", "")):
                yield at + cell.index(inner), inner, unit(head[0]) if head else ""
            at += len(cell) + 1
        at -= 1


def runs(page: str) -> list[Run]:
    """Return all numbers with a unit of a page, code left out.

    >>> [(run.line, run.text, run.said) for run in runs("# T\\nTakes 5 to\\n6 ms<!-- a/b -->, `7 ms`.")]
    [(2, '5 to\\n6 ms', 'a/b')]
    """
    prose = CODE.sub(lambda match: blank(match, "`"), page)
    comments = {match.start(): match[1] for match in COMMENT.finditer(prose)}
    text = COMMENT.sub(lambda match: blank(match, "\0"), prose)
    stretches = sorted(declared(prose))
    found = [(match.start(), match[0], phrases(text, match)) for match in RUN.finditer(text)]
    for table in TABLE.finditer(text):
        keyed = any(start == table.start() and not is_kind(what) for start, _, what in stretches)
        for at, inner, name in columns(text, table, bare=keyed):
            if not any(start <= at < start + len(own) for start, own, _ in found):
                cells = re.findall(NUMBER, inner.replace("*", ""))
                found.append((at, inner, tuple(Number(number, name) for number in cells)))
    result = []
    for at, own, numbers in sorted(found):
        said = comments.get(at + len(own))
        around = [what for start, end, what in stretches if start <= at < end]
        before = max(text.rfind(end, 0, at) for end in (". ", ".\n", "\n\n", "\n|", "\n- ", ":\n"))
        behind = min(
            (hit for end in (". ", ".\n", "\n\n", "|\n") if (hit := text.find(end, at)) >= 0), default=len(text)
        )
        line = page.count("\n", 0, at) + 1
        sentence = text[before + 1 : behind].strip()
        result.append(Run(at, line, own, numbers, said or (around[-1] if around else None), bool(said), sentence))
    return result


def results() -> dict[str, tuple[list[Decimal], str]]:
    """Return the checked-in results: the values and the unit of every key."""
    known = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"), parse_float=Decimal)
    return {
        f"{script}/{name}": ([Decimal(value) for values in entry["values"].values() for value in values], entry["unit"])
        for script, group in known.items()
        for name, entry in group["results"].items()
    }


def looked_up(said: str, known: Mapping[str, tuple[list[Decimal], str]]) -> tuple[list[Decimal], str] | None:
    """Return the values that a comment stands for, and their unit.

    >>> known = {"a/b": ([Decimal("1.02")], "times"), "a/c": ([Decimal("4")], "s"), "a/d": ([Decimal("2")], "s")}
    >>> looked_up("a/b - 1", known), looked_up("a/c / a/d", known), looked_up("1 / a/c", known), looked_up("a/d", known)
    (([Decimal('0.02')], 'times'), ([Decimal('2')], 'times'), ([Decimal('0.25')], 'times'), ([Decimal('2')], 's'))
    """
    key = r"([\w.-]+/[\w./-]+)"
    match = re.fullmatch(rf"(1 - |1 / )?{key}(?: / {key})?( - 1)?", said)
    if match is None or match[2] not in known or (match[3] or match[2]) not in known:
        return None
    values, name = known[match[2]]
    if match[3]:
        values = [upper / lower for upper, lower in zip(values, known[match[3]][0], strict=True)]
        name = "times"
    if match[1] == "1 / ":
        return [1 / value for value in values], "times"
    return [1 - value if match[1] else value - 1 if match[4] else value for value in values], name


def faults(page: str, known: Mapping[str, tuple[list[Decimal], str]], shown: Mapping[str, str]) -> list[str]:
    """Return what is wrong about a page's numbers, each with its line; `shown` has what the pages' blocks print."""
    wrong: list[str] = []
    tables: dict[str, list[tuple[int, Number]]] = {}
    for run in runs(page):
        where = f"line {run.line}: {' '.join(run.text.split())!r}"
        if run.said is None:
            wrong.append(f"{where} is not said to be from anywhere")
        elif is_kind(run.said):
            if not run.itself and SOUNDS_MEASURED.search(run.sentence):
                wrong.append(f"{where} sounds measured and has no comment of its own")
            if run.said.startswith("shown"):
                printed = shown[run.said.removeprefix("shown in ") if " in " in run.said else ""]
                wrong += [
                    f"{where}: no block prints {number.text}"
                    for number in run.numbers
                    if not re.search(rf"(?<![\d.]){re.escape(number.text)}(?![\d.]*\d)", printed)
                ]
            if run.said.startswith("published") and not re.fullmatch(r"published: (https://\S+|\S+\.md\S*)", run.said):
                wrong.append(f"{where}: published where?")
        elif run.itself:
            wrong += compared(where, run.numbers, run.said, known)
        else:
            tables.setdefault(run.said, []).extend((run.line, number) for number in run.numbers)
    for said, cells in tables.items():
        wrong += compared(f"the table on line {cells[0][0]}", tuple(number for _, number in cells), said, known)
    return wrong


def compared(
    where: str, numbers: tuple[Number, ...], said: str, known: Mapping[str, tuple[list[Decimal], str]]
) -> list[str]:
    found = looked_up(said, known)
    if found is None:
        return [f"{where}: {said!r} is neither a kind nor a key of benchmarks/results.json"]
    values, name = found
    if len(values) != len(numbers):
        return [f"{where} has {len(numbers)} numbers, {said} has {len(values)}"]
    return [
        f"{where}: {number.text} {number.unit} where {said} has {value} {name}"
        for number, value in zip(numbers, values, strict=True)
        if not number.shows(value, name)
    ]


def without_comments(page: str) -> str:
    """Return a page as readers see it.

    >>> without_comments("41%<!-- a/b --> of it\\n<!-- not run: GPUs -->\\nNext")
    '41% of it\\nNext'
    """
    return re.sub(r"^<!--[^\n]*-->\n|<!--.*?-->", "", page, flags=re.DOTALL | re.MULTILINE)


if __name__ == "__main__":
    for path in (path for path in PAGES if not sys.argv[1:] or path.name in sys.argv[1:]):
        for run in runs(path.read_text(encoding="utf-8")):
            if run.said is None:
                print(f"{path.name}:{run.line}: {' '.join(run.text.split())} | {' '.join(run.sentence.split())[:150]}")
