"""Makes the lists and tables of pages about SOK, TFRA and TFPlus from docs/surface/*.toml.

A page has a line `<!-- made by tools/make_surface.py from surface/tfra.toml: methods -->` where
the table of that section belongs, and `<!-- end -->` below; `counts` is how many names there are of
each verdict. These tables name the tests, and are in docs/internals. Lists for who comes from a
system have one of VIEWS in the place of the section. With --check nothing is written, and the exit
code is 1 where a page is out of date.

An entry of a section is of a name, of several (`names`), or of a behavior in a few words:
  same, better, differs, refused, no_effect, ours
                 its verdict, one of these: what it does here, in one sentence or a list of them
  default        of an argument
  takes          the documented arguments of a function; `property = true`: it is a property
  behind         the function below `sok_lite` that does the work
  tests          those that show it, below tests/<the package>/ or, with a folder, below tests/
  there, here    in place of a verdict: what the other system gets wrong, and what this one does
A section, or an entry, says what its names are of, if not of the package: `names_of`,
`arguments_of`, or `keywords_of` for what a function takes as **kwargs. A section has a `heading`.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tools.made_pages import main_of

# Python 3.10 has no tomllib; pytest brings the same module along for it.
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [
    DOCS / "internals" / "compatibility-evidence.md",
    DOCS / "internals" / "sok-evidence.md",
    DOCS / "compatibility.md",
    DOCS / "migrating_from_sok.md",
]
MADE = re.compile(
    r"(<!-- made by tools/make_surface\.py from surface/(\w+)\.toml: ([\w ]+) -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
VERDICTS = ("same", "better", "differs", "refused", "no_effect", "ours")
# What a reader looks for, with the verdicts of it.
WORKS = "what works"
VIEWS = {
    WORKS: ("same", "better"),
    "what differs": ("differs", "no_effect"),
    "what is missing": ("refused",),
    "what is added": ("ours",),
}
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


def view(entries: list[Entry], name: str) -> str:
    """Returns the list of a view, by section: names of what works, else what it does here."""
    of_sections: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.verdict in VIEWS[name]:
            of_sections.setdefault(entry.fields["heading"], []).append(entry)
    lines = []
    for heading, chosen in of_sections.items():
        lines += ["", f"{heading}:", ""]
        names = [each for entry in chosen for each in entry.names]
        if name == WORKS and names:
            lines += _item(", ".join(f"`{each}`" for each in names))
            chosen = [entry for entry in chosen if not entry.names]
        for entry in chosen:
            text = entry.fields[entry.verdict]
            facts = [text] if isinstance(text, str) else text
            said = ["no effect"] if entry.verdict == "no_effect" else []
            # What a table says of a behavior goes on as a sentence.
            is_sentence = entry.section == "behavior" and entry.verdict != "refused"
            title = f"**{entry.title}**" if is_sentence else f"{entry.title}:"
            lines += _item(f"{title} {'; '.join([*said, *facts])}")
    return "\n".join(lines[1:])


def _item(text: str) -> list[str]:
    """Returns the lines of an item of a list."""
    words: list[str] = _WORDS.findall(text)
    lines: list[str] = []
    while words:
        start = "  " if lines else "* "
        lines.append(start + (_taken(words, _LINE - len(start)) or words.pop(0)))
    return lines


def table(entries: list[Entry]) -> str:
    """Returns the table of a section, for a page of docs/internals."""
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
    listed = [_from_internals(fact) for fact in ([text] if isinstance(text, str) else text)]
    facts = [_WORDS.findall(fact) for fact in listed]
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


def _from_internals(text: str) -> str:
    """Returns a text whose links are those of a page in docs as a page in docs/internals has it."""
    return re.sub(r"\]\((?!\w+:)", "](../", text)


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
        if section == "counts":
            text = counts(entries)
        elif section in VIEWS:
            text = view(entries, section)
        else:
            text = table([entry for entry in entries if entry.section == section])
        return f"{begin}\n{text}\n\n{end}"

    return MADE.sub(made, page)


def main() -> int:
    return main_of(PAGES, page_with_tables, "Writes the lists and tables of the pages.")


if __name__ == "__main__":
    sys.exit(main())
