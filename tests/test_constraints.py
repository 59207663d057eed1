"""constraints.txt lists what the extras resolve to and nothing else: compared with the packages that are installed.

What is not installed here, or in another version (extras that `make setup` leaves out, another PyTorch), cannot be
asked what it needs. The names after `via` stand in for it: a chain of them has to lead to an extra.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement  # comes with pytest

from some import some

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINE = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[\w.]+)  # via (?P<via>[\w.\[\]-]+(?:, [\w.\[\]-]+)*)")
# What PyTorch's CUDA builds ask for; the tested set has the CPU build.
FOR_CUDA = re.compile("(nvidia|cuda|triton)(-|$)")


def plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def pins() -> dict[str, tuple[str, set[str]]]:
    """Return version and `via` of every package in the file."""
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    found = {}
    for line in some(lines):
        parts = LINE.fullmatch(line)
        assert parts is not None, f"expected NAME==VERSION  # via WHO, got {line!r}"
        found[plain(parts["name"])] = (parts["version"], set(parts["via"].split(", ")))
    assert len(found) == len(lines), "a package stands twice"
    assert list(found) == sorted(found)
    return found


def asked_by_project() -> dict[str, set[str]]:
    """Return which extras name every package, and with which extras of its own as `name[extra]`."""
    tables = {"drumline": PROJECT["dependencies"]}
    tables |= {f"drumline[{extra}]": wanted for extra, wanted in PROJECT["optional-dependencies"].items()}
    asked: dict[str, set[str]] = {}
    for who, wanted in tables.items():
        for item in map(Requirement, wanted):
            for name in (plain(item.name), *(f"{plain(item.name)}[{extra}]" for extra in item.extras)):
                asked.setdefault(name, set()).add(who)
    return {name: who for name, who in asked.items() if not name.startswith("drumline")}


@cache
def installed_requirements(name: str, version: str) -> list[Requirement] | None:
    """Return what a package asks for, if it is installed in the version that is pinned."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    if found.version.partition("+")[0] != version:
        return None
    wanted = [Requirement(require) for require in found.requires or []]
    return [requirement for requirement in wanted if not (name == "torch" and FOR_CUDA.match(plain(requirement.name)))]


def asked_by_packages(pinned: dict[str, tuple[str, set[str]]]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return who asks for every package here, and who does so under some condition, of those installed as pinned."""
    here: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    wanted = {name: installed_requirements(name, version) or [] for name, (version, _) in pinned.items()}
    for who, requirements in wanted.items():
        for requirement in requirements:
            named.setdefault(plain(requirement.name), set()).add(who)
    due = [(name, "") for name in pinned]
    due += [(name, extra[:-1]) for name, _, extra in (name.partition("[") for name in asked_by_project()) if extra]
    chosen: set[tuple[str, str]] = set()
    while due:
        who, extra = due.pop()
        if (who, extra) not in chosen:
            chosen.add((who, extra))
            for requirement in wanted.get(who, []):
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    here.setdefault(plain(requirement.name), set()).add(who)
                    due += [(plain(requirement.name), more) for more in requirement.extras]
    return here, named


def test_constraints_list_everything_that_the_extras_name() -> None:
    pinned = pins()
    for name, who in some(list(asked_by_project().items())):
        extras = {text for text in pinned[name.partition("[")[0]][1] if text.startswith("drumline")}
        assert who <= extras, f"{name} is asked for by {', '.join(sorted(who - extras))}"


def test_constraints_list_everything_that_installed_packages_ask_for() -> None:
    pinned = pins()
    here, _ = asked_by_packages(pinned)
    for name, who in some(list(here.items())):
        assert name in pinned, f"{', '.join(sorted(who))} asks for {name}, which has no pin: pin_constraints.py adds it"
        # On another Python, other packages may ask for it, too.
        assert who & pinned[name][1], f"{name} is asked for by {', '.join(sorted(who))}"


def test_every_pin_is_asked_for_by_those_it_names_and_through_them_by_an_extra() -> None:
    pinned = pins()
    _, named = asked_by_packages(pinned)
    by_project = asked_by_project()
    seen = {name for name, (version, _) in pinned.items() if installed_requirements(name, version) is not None}
    for name, (_, via) in some(list(pinned.items())):
        wrong = {text for text in via if text.startswith("drumline")} - by_project.get(name, set())
        wrong |= {text for text in via & seen if text not in named.get(name, set())}
        wrong |= {text for text in via if not text.startswith("drumline")} - pinned.keys()
        assert not wrong, f"{name} is not asked for by {', '.join(sorted(wrong))}"
    reached = {name for name, (_, via) in pinned.items() if any(text.startswith("drumline") for text in via)}
    while more := {name for name, (_, via) in pinned.items() if via & reached} - reached:
        reached |= more
    assert reached == pinned.keys(), "no extra needs these"


def test_versions_are_within_what_installed_packages_accept() -> None:
    pinned = pins()
    tables = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = [("drumline", Requirement(entry)) for table in tables for entry in table]
    for name, (version, _) in pinned.items():
        wanted += [(name, item) for item in installed_requirements(name, version) or [] if item.marker is None]
    for who, requirement in some(wanted):
        if (name := plain(requirement.name)) != "drumline":
            assert requirement.specifier.contains(pinned[name][0], prereleases=True), f"{who} wants {requirement}"
