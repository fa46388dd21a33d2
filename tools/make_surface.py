"""Makes the lists of docs/compatibility.md from docs/surface/*.toml.

A line `<!-- made by tools/make_surface.py from surface/tfra.toml: what differs -->` stands where
the list of that one of VIEWS belongs, and `<!-- end -->` below.

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

from tools.made_pages import write

# Python 3.10 has no tomllib; pytest brings the same module along for it.
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [DOCS / "compatibility.md"]
MADE = re.compile(
    r"(<!-- made by tools/make_surface\.py from surface/(\w+)\.toml: ([\w ]+) -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
VERDICTS = ("same", "better", "differs", "refused", "no_effect", "ours")
# What the page lists, with the verdicts of it: of all other names a reader needs to know nothing.
VIEWS = {"what differs": ("differs", "no_effect"), "what is missing": ("refused",)}
_LINE = 120
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


def view(entries: list[Entry], name: str) -> str:
    """Returns the list of a view, by section: each entry with what it does here."""
    of_sections: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.verdict in VIEWS[name]:
            of_sections.setdefault(entry.fields["heading"], []).append(entry)
    lines = []
    for heading, chosen in of_sections.items():
        lines += ["", f"{heading}:", ""]
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


def _taken(words: list[str], width: int) -> str:
    """Takes from a list the words that a line has room for, and returns them."""
    line = ""
    while words and len(f"{line} {words[0]}".strip()) <= width:
        line = f"{line} {words.pop(0)}".strip()
    return line


def page_with_tables(page: str) -> str:
    """Returns the text of a page with its lists as they are to be."""

    def made(match: re.Match[str]) -> str:
        begin, system, section, end = match.groups()
        return f"{begin}\n{view(entries_of(system), section)}\n\n{end}"

    return MADE.sub(made, page)


if __name__ == "__main__":
    write(PAGES, page_with_tables, "Writes the lists of the pages.")
