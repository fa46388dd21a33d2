"""Statistics and one-line summaries of tables.

`statistics`, `totals`, `seen_lately`, `summary` and `facts` are methods of `EmbeddingTable`.
"""

from typing import Any

from sok_lite.engine.table.base import TableBase
from sok_lite.engine.table.locking import locked
from sok_lite.engine.table.results import Statistics


@locked
def statistics(table: TableBase) -> Statistics:
    """Returns counters and sizes. It scans the whole index for the probe lengths."""
    mean_probe, longest_probe = table.index.probe_lengths()
    tiers = table.store.tier_bytes()
    return Statistics(
        size=table.size,
        capacity=table.capacity,
        load_factor=table.load_factor,
        **totals(table),
        rehashes_total=table.index.num_rehashes,
        mean_probe=mean_probe,
        longest_probe=longest_probe,
        index_bytes=table.index_bytes,
        near_bytes=tiers.near_used,
        far_bytes=tiers.far_used,
        near_reserved_bytes=tiers.near,
        far_reserved_bytes=tiers.far,
        text_bytes=table.text_bytes,
    )


@locked
def totals(table: TableBase) -> dict[str, int]:
    """Returns the counters of `statistics()`, such as "found_total", without reading the index."""
    return {f"{name}_total": count for name, count in table.counters.by_name().items()}


@locked
def seen_lately(table: TableBase) -> tuple[int, int] | None:
    """Returns how often recent lookups asked for keys whose row is near now, and for any key; None:
    all rows are near.

    Older lookups count less, and those while the tiers pause not at all.
    """
    return None if table.tiers is None else table.tiers.seen_lately()


def summary(table: Any) -> str:
    """Returns one line about a table."""
    tiers = table.store.tier_bytes()
    text, memory = f"keys={table.size:,} fill={_fill(table)} ", tiers.near_used + table.index_bytes
    if table.keeps_every_key:
        text += f"memory={format_bytes(memory)} "
    else:
        text += f"evicted={table.num_evicted:,} memory={format_bytes(memory)} near, "
        text += f"{format_bytes(tiers.far_used)} far "
    if table.texts is not None:
        text += f"texts={format_bytes(table.text_bytes)} "
    return f"{text}on {table.backend.name}"


def facts(table: Any, dtype: str) -> dict[str, str]:
    """Returns the facts that a notebook shows of a table, by title.

    Args:
      dtype: name of the rows' dtype.
    """
    tiers = table.store.tier_bytes()
    found = {
        "keys": f"{table.size:,}",
        "row": f"{table.dim} x {dtype}",
        "key type": table.key_dtype.name,
        "kind of table": f"{table.var_type}, in {_place(table)}",
        "fill": _fill(table),
        "optimizer states": ", ".join(table.store.state_names) or "none",
    }
    if not table.keeps_every_key:
        found |= {
            "evicted": f"{table.num_evicted:,} keys ({table.evict_strategy})",
            "near memory of rows and states": format_bytes(tiers.near_used),
            "far memory of rows and states": format_bytes(tiers.far_used),
        }
    else:
        found["memory of rows and states"] = format_bytes(tiers.near_used)
    found |= {
        "memory reserved for more rows": format_bytes(
            table.store.num_bytes - table.store.used_bytes
        ),
        "memory of the index": format_bytes(table.index_bytes),
    }
    return (
        found
        if table.texts is None
        else found | {"memory of texts": format_bytes(table.text_bytes)}
    )


def _place(table: Any) -> str:
    """Returns where the rows are. Tables of kind "hbm" are in RAM where there is no GPU."""
    if table.backend.name == "cpu":
        return "RAM"
    return "GPU memory" if table.keeps_every_key else "GPU memory and RAM"


def _fill(table: Any) -> str:
    text = f"{table.load_factor:.0%} of {table.capacity:,} slots"
    if table.max_capacity is not None and table.capacity < table.max_capacity:
        text += f" (at most {table.max_capacity:,})"
    return text


def format_bytes(count: int) -> str:
    """Returns a number of bytes as text, such as "1.5 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
