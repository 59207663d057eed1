"""What a release hands out: its version everywhere, the files in the wheel, and forms that ask for what we need."""

from __future__ import annotations

import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import drumline
from extras import needed
from some import some

ROOT = Path(__file__).resolve().parent.parent
CHECK = runpy.run_path(str(ROOT / "scripts" / "release_check.py"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize(
    ("changelog", "top"),
    [
        ("# Changelog\n\nText.\n\n## Unreleased\n\n## 0.1.0\n", "Unreleased"),
        ("# Changelog\n\n## 0.2.0, 2027-01-31\n\n### Fixed\n\n## 0.1.0\n", "0.2.0"),
        ("# Changelog\n\n## [0.2.0] - 2027-01-31\n", "0.2.0"),
        ("# Changelog\n\n### Fixed\n", ""),
    ],
)
def test_the_newest_section_of_a_changelog_is_found(changelog: str, top: str) -> None:
    assert CHECK["top_of"](changelog) == top


def test_a_wheel_is_compared_with_the_source_file_by_file(tmp_path: Path) -> None:
    wheel = tmp_path / "drumline-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("drumline/__init__.py", "drumline/notes.txt", "drumline-0.1.0.dist-info/METADATA"):
            archive.writestr(name, "")
        archive.writestr("drumline/core/kernel/kernel-linux-x86_64.shared", "")
    source = ["src/drumline/__init__.py", "src/drumline/py.typed"]
    assert CHECK["differences"](wheel, source) == [
        "drumline/py.typed is missing",
        "drumline/notes.txt is not in the source",
    ]
    assert CHECK["differences"](wheel, ["src/drumline/__init__.py", "src/drumline/notes.txt"]) == []


def test_a_failed_check_ends_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = CHECK["main"]
    monkeypatch.setattr(sys, "argv", ["release_check.py"])
    monkeypatch.setitem(main.__globals__, "checks", lambda scratch: iter([("a", ""), ("b", "found c")]))
    assert main() == 1
    assert capsys.readouterr().out.splitlines() == ["holds  a", "FAILS  b: found c"]
    monkeypatch.setitem(main.__globals__, "checks", lambda scratch: iter([("a", "")]))
    assert main() == 0


def test_the_citation_has_the_version_of_the_source_and_no_made_up_people() -> None:
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {drumline.__version__}" in lines
    assert [line for line in lines if line.startswith("  - name: ")] == ["  - name: The Drumline authors"]
    assert not any("family-names" in line for line in lines)


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert [path.stem for path in FORMS] == ["bug", "config", "gradient", "question"]
    forms = [path.read_text(encoding="utf-8") for path in FORMS if path.stem != "config"]
    for text in some(forms):
        assert all(f"\n{key}: " in text for key in ("name", "description", "labels"))
        assert "\nbody:\n" in text
        assert "required: true" in text
    assert "`drumline verify`" in forms[1]


def test_forms_and_citation_are_clean_yaml() -> None:
    needed("yamllint", "dev")
    command = [sys.executable, "-m", "yamllint", "--strict", *map(str, some(FORMS)), "CITATION.cff"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (found.returncode, found.stdout) == (0, "")
