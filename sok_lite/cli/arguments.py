"""Arguments shared by commands."""

import argparse

from sok_lite.engine.files.store import Store, is_in_store
from sok_lite.engine.local_path import local_path


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of commands that read one PATH of any format and print a result."""
    add_path(parser)
    add_tables(parser)
    add_json(parser)
    add_from_format(parser, "PATH")


def add_path(parser: argparse.ArgumentParser) -> None:
    """Adds PATH, of any format."""
    parser.add_argument(
        "path",
        metavar="PATH",
        type=readable,
        help="checkpoint folder or its address, .keras file, or file in another format",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def add_tables(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="NAME",
        help="only this table (repeatable)",
    )


def add_from_format(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --from-format and --from-option; `what` is being read."""
    parser.add_argument(
        "--from-format", metavar="FORMAT", help=f"format of {what} (default: detected)"
    )
    add_option(parser, "--from-option", what)


def add_option(parser: argparse.ArgumentParser, name: str, what: str) -> None:
    """Adds an argument for options of a format."""
    parser.add_argument(
        name,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"option of the format of {what} (repeatable)",
    )


def add_force(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --force; `what` is being replaced."""
    parser.add_argument("--force", action="store_true", help=f"replace {what}")


def local(text: str) -> str:
    """Returns a local path."""
    try:
        return local_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def readable(text: str) -> str:
    """Returns a local path, or the address of a checkpoint."""
    if not is_in_store(text):
        return local(text)
    try:
        return Store(text).given
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def rank_count(text: str) -> int:
    """Returns a number of ranks."""
    if not text.isdecimal() or not 1 <= int(text) <= 99_999:
        raise argparse.ArgumentTypeError(f"must be a number of ranks, from 1 on, and is {text!r}")
    return int(text)
