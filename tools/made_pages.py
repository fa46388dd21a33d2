"""Writes the parts of pages that tools make, or says that they are out of date.

Such a part stands between `<!-- made by tools/make_X.py ... -->` and `<!-- end -->`.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path


def main_of(pages: Iterable[Path], made: Callable[[str], str], description: str) -> int:
    """Writes pages anew, or with --check only looks; returns the exit code.

    Args:
      pages: files.
      made: gives the text of a page, as it is, with its parts as they are to be.
      description: for --help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    new = {page: made(page.read_text()) for page in pages}
    old = [page for page in new if page.read_text() != new[page]]
    for page in old:
        print(f"{page.name} {'is not up to date' if is_check else 'was written'}")
        if not is_check:
            page.write_text(new[page])
    return int(is_check and bool(old))
