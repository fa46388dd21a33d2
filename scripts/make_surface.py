"""Makes the tables of compatibility.md and migrating_from_sok.md in docs from docs/surface/*.toml.

A page has a line `<!-- made by scripts/make_surface.py from surface/tfra.toml: methods -->` where
the table of that section belongs, and `<!-- end -->` below; `counts` is how many names there are of
each verdict. With --check nothing is written, and the exit code is 1 where a page is out of date.

An entry of a section is of a name, of several (`names`), or of a behavior in a few words:
  same, better, differs, refused, no_effect, ours
                 its verdict, one of these: what it does here, in one sentence or a list of them
  default        of an argument
  takes          the documented arguments of a function; `property = true`: it is a property
  behind         the function below `sok_lite` that does the work
  tests          those that show it, below tests/<the package>/ or, with a folder, below tests/
  there, here    in place of a verdict: what the other system gets wrong, and what this one does
A section, or an entry, says what its names are of, if not of the package: `names_of`,
`arguments_of`, or `keywords_of` for what a function takes as **kwargs.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from made_pages import main_of

# Python 3.10 has no tomllib; pytest brings the same module along for it.
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [DOCS / "compatibility.md", DOCS / "migrating_from_sok.md"]
MADE = re.compile(
    r"(<!-- made by scripts/make_surface\.py from surface/(\w+)\.toml: (\w+) -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
VERDICTS = ("same", "better", "differs", "refused", "no_effect", "ours")
_LINE = 120
# Characters of the first column: an entry takes those that give it the fewest lines.
_WIDTHS = (40, 52, 64, 76)
# What a line cannot end in: code and links.
_WORDS = re.compile(r"(?:`[^`]*`|\[[^\]]*\]\([^)]*\)|\S)+")


class Entry(NamedTuple):
    """What is said of names, or of a behavior, which has none; with the fields of its section."""

    section: str
    title: str
    names: list[str]
    fields: dict[str, Any]

    @property
    def verdict(self) -> str:
        return next((verdict for verdict in VERDICTS if verdict in self.fields), "")


def entries_of(system: str) -> list[Entry]:
    """Returns the entries of docs/surface/<system>.toml in their order."""
    found = []
    sections = tomllib.loads((DOCS / "surface" / f"{system}.toml").read_text())
    for section, content in sections.items():
        of = {key: value for key, value in content.items() if not isinstance(value, dict)}
        for key, fields in ((key, content[key]) for key in content if key not in of):
            is_words = " " in key or "there" in fields
            names = fields.get("names", [] if is_words else [key])
            default = f"={fields['default']}" if "default" in fields else ""
            title = ", ".join(f"`{name}{default}`" for name in names) or key
            found.append(Entry(section, title, names, {**of, **fields}))
    return found


def counts(entries: list[Entry]) -> str:
    """Returns how many names and behaviors there are of each verdict."""
    found = {
        verdict: sum(len(entry.names) or 1 for entry in entries if entry.verdict == verdict)
        for verdict in VERDICTS
    }
    parts = [f"{count} {verdict.replace('_', ' ')}" for verdict, count in found.items() if count]
    return f"{sum(found.values())} names and behaviors: {', '.join(parts)}."


def table(entries: list[Entry]) -> str:
    """Returns the table of a section."""
    heads = ["row", "there"] if "there" in entries[0].fields else ["name", "verdict"]
    lines = [f"| {' | '.join(heads)} | what it does here | shown by |", "|---|---|---|---|"]
    for entry in entries:
        shortest = min([_lines(entry, width) for width in _WIDTHS], key=len)
        lines += shortest
    return "\n".join(lines)


def _lines(entry: Entry, width: int) -> list[str]:
    """Returns the lines of an entry: each has what there is room for, and of one fact at most."""
    second = entry.fields.get("there") or entry.verdict.replace("_", " ")
    text = entry.fields[entry.verdict or "here"]
    words = _WORDS.findall(entry.title)
    facts = [_WORDS.findall(fact) for fact in ([text] if isinstance(text, str) else text)]
    files = list(dict.fromkeys(f"`{test.split('::')[0]}`" for test in entry.fields["tests"]))
    lines = []
    while words or facts or files:
        first = words and (_taken(words, width) or words.pop(0))
        cells = [first or "", second, "", files.pop(0) if files else ""]
        if facts:
            room = _LINE - sum(map(len, cells)) - len("|  |  |  |  |")
            cells[2] = _taken(facts[0], room)
            facts = facts if facts[0] else facts[1:]
        lines.append("".join(f"| {cell} " if cell else "| " for cell in cells) + "|")
        second = ""
    return lines


def _taken(words: list[str], width: int) -> str:
    """Takes from a list the words that a line has room for, and returns them."""
    line = ""
    while words and len(f"{line} {words[0]}".strip()) <= width:
        line = f"{line} {words.pop(0)}".strip()
    return line


def page_with_tables(page: str) -> str:
    """Returns the text of a page with its tables as they are to be."""

    def made(match: re.Match[str]) -> str:
        begin, system, section, end = match.groups()
        entries = entries_of(system)
        of_section = [entry for entry in entries if entry.section == section]
        text = counts(entries) if section == "counts" else table(of_section)
        return f"{begin}\n{text}\n\n{end}"

    return MADE.sub(made, page)


def main() -> int:
    return main_of(PAGES, page_with_tables, "Writes the tables of the pages.")


if __name__ == "__main__":
    sys.exit(main())
