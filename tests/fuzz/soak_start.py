"""Starts what each rank runs, with the sok_lite of this checkout and no other."""

import importlib.machinery
import sys


def main() -> None:
    # An editable install of another checkout has a finder that comes before all paths.
    sys.meta_path.insert(0, importlib.machinery.PathFinder)
    from tests.fuzz import soak_job

    soak_job.main()


if __name__ == "__main__":
    main()
