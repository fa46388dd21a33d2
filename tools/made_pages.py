"""Writes the parts of pages that tools make.

Such a part stands between `<!-- made by tools/make_X.py ... -->` and `<!-- end -->`. The tests say
where one is out of date.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path


def write(pages: Iterable[Path], made: Callable[[str], str], description: str) -> None:
    """Writes pages anew, and says which.

    Args:
      pages: files.
      made: gives the text of a page, as it is, with its parts as they are to be.
      description: for --help.
    """
    argparse.ArgumentParser(description=description).parse_args()
    for page in pages:
        old = page.read_text()
        new = made(old)
        if new != old:
            page.write_text(new)
            print(f"{page.name} was written")
