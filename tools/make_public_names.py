"""Makes the lists of docs/surface/public_names.txt and docs/public_names.md from the code.

A list stands below a line `<!-- made by tools/make_public_names.py: sok_lite.keras -->`. The name
is that of a module, or one of the functions of `LISTS`. What is public is thus seen to change in
the diff of these files.
"""

import argparse
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.made_pages import write

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES = DOCS / "surface" / "public_names.txt"
PAGE = DOCS / "public_names.md"
MADE = re.compile(
    r"(<!-- made by tools/make_public_names\.py: ([\w. ]+) -->\n).*?(<!-- end -->)", re.DOTALL
)

# What other modules of sok_lite ask of its classes, and no program does.
INTERNAL = {
    *(
        "after_step",
        "begin",
        "features_of",
        "free_with_its_variable",
        "handles",
        "has_texts",
        "resources",
    ),
    *("is_trained_by", "key_dtype_name", "listed", "owner_rank", "ready_inputs", "safe_lookup"),
    *("spec_shape", "table", "take", "trained_as"),
    # What is gone, and says so.
    *("to_dynamic", "to_static"),
}


def names_of(module: str) -> list[str]:
    """Returns the lines of the names that a module gives, in its `__all__`."""
    package = importlib.import_module(module)
    found = {name: getattr(package, name) for name in sorted(package.__all__, key=str.lower)}
    lines = []
    for name, value in found.items():
        if inspect.ismodule(value):
            continue
        lines += _item("", name, value)
        if inspect.isclass(value):
            lines += [
                line
                for method, of_class in methods_of(value)
                for line in _item("    ", f".{method}", of_class, is_method=True)
            ]
    return lines


def methods_of(owner: type) -> Iterator[tuple[str, Any]]:
    """Yields (name, function or property) of what a class has besides what Keras or Horovod ask."""
    ours = [base for base in owner.__mro__ if base.__module__.startswith("sok_lite")]
    theirs = {name for base in set(owner.__mro__) - set(ours) for name in vars(base)}
    found: dict[str, Any] = {}
    for base in ours:
        for name, value in vars(base).items():
            is_method = inspect.isfunction(value) or isinstance(
                value, (property, classmethod, staticmethod)
            )
            if is_method and not name.startswith("_") and name not in theirs | INTERNAL:
                found.setdefault(name, value)
    for name in sorted(found):
        yield name, found[name]


def fields_of_statistics() -> list[str]:
    """Returns the lines of the fields of `statistics()`, from their docstring."""
    from sok_lite.engine.table import Statistics

    text = inspect.getdoc(Statistics) or ""
    items = re.findall(
        r"^  ([\w, ]+): (.*?)(?=^  \w|\Z)", text.split("Attributes:\n")[1], re.M | re.S
    )
    lines = []
    for names, said in items:
        code = ", ".join(f"`{name}`" for name in names.split(", "))
        lines += _wrapped("", f"{code}: {' '.join(said.split())}")
    return lines


def commands() -> list[str]:
    """Returns the lines of the commands of `sok-lite` and what they take."""
    from sok_lite.cli.main import _parser

    (of_commands,) = (
        action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    lines = []
    for name, each in of_commands.choices.items():
        taken = [
            action.option_strings[-1]
            if action.option_strings
            else str(action.metavar or action.dest)
            for action in each._actions
            if "--help" not in action.option_strings
        ]
        lines += _wrapped("", f"`sok-lite {name}`: {', '.join(f'`{each}`' for each in taken)}")
    return lines


LISTS = {"statistics": fields_of_statistics, "commands": commands}


def _item(indent: str, name: str, value: Any, *, is_method: bool = False) -> list[str]:
    """Returns the lines of a name: how it is called."""
    return _wrapped(indent, f"`{name}{_arguments(value, is_method)}`")


def _arguments(value: Any, is_method: bool) -> str:
    """Returns the arguments of a function, method or class as a call has them, without types."""
    if isinstance(value, (classmethod, staticmethod)):
        return _arguments(value.__get__(None, object), False)
    if not callable(value):
        return ""
    return str(shown_signature(value, is_method))


def shown_signature(function: Any, is_method: bool) -> inspect.Signature:
    """Returns a signature as a call has it: without types and a method's `self`."""
    empty = inspect.Parameter.empty
    shown = [
        each.replace(
            annotation=empty, default=empty if each.default is empty else _Shown(each.default)
        )
        for each in list(inspect.signature(function).parameters.values())[is_method:]
    ]
    return inspect.Signature(shown)


class _Shown:
    """A default in few words."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if isinstance(self.value, enum.Enum):
            return f"{type(self.value).__name__}.{self.value.name}"
        return getattr(self.value, "__name__", None) or repr(self.value)


def _wrapped(indent: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        120,
        initial_indent=f"{indent}* ",
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def page_with_lists(page: str) -> str:
    """Returns the text of a page with its lists as they are to be."""

    def made(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        lines = LISTS[name]() if name in LISTS else names_of(name)
        return "\n".join([begin, *lines, "", end])

    return MADE.sub(made, page)


if __name__ == "__main__":
    write([NAMES, PAGE], page_with_lists, "Writes the lists of public names.")
