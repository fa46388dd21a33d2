"""`python -m sok_lite` is the command line `sok-lite`."""

import sys

from sok_lite.cli.main import entry

sys.exit(entry())
