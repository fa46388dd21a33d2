"""Measures what a table costs beside its rows: bytes a key, before and after its index grows.

One line `RESULT {json}` per size. `resident` is what the process has beyond what it had with an
empty table, less the rows themselves; `peak` is the same at its highest, which is while an index
grows and the old one is still there. CPU and Linux only: it reads /proc/self/status.

Example:
  python -m scripts.bench memory index --dim 64
"""

import numpy as np

from scripts.bench.common.measuring import result as print_result
from scripts.bench.common.measuring import status_bytes
from sok_lite.backend import get_backend
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table


def main(parser):
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[1_000_000, 1_460_000, 1_480_000, 4_000_000]
    )
    args = parser.parse_args()
    table = make_table(
        "hbm", get_backend("cpu"), args.dim, initializer=make_initializer("random", args.dim)
    )
    table.lookup(np.arange(10))
    empty_bytes = status_bytes("VmRSS")
    rng = np.random.default_rng(0)
    for size in args.sizes:
        while table.size < size:
            table.find_or_insert(rng.integers(0, 2**62, min(50_000, size - table.size)))
        row_bytes = table.size * args.dim * 4
        result = {
            "keys": table.size,
            "dim": args.dim,
            "load_factor": round(table.load_factor, 3),
            "index_bytes_per_key": round(table.index_bytes / table.size, 1),
        }
        for name, field in (("resident", "VmRSS"), ("peak", "VmHWM")):
            beside = status_bytes(field) - empty_bytes - row_bytes
            result[f"{name}_bytes_per_key"] = round(beside / table.size, 1)
        print_result(**result)
