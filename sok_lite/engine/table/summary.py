"""A table in words: how full it is, what it lost, where its memory is."""

from typing import Any


def summary(table: Any) -> str:
    """Returns one line about a table."""
    tiers = table.store.tier_bytes()
    text = f"keys={table.size:,} fill={_fill(table)} "
    if not table.keeps_every_key:
        text += (
            f"evicted={table.num_evicted:,} memory={as_bytes(tiers.near_used + table.index_bytes)} "
            f"near, {as_bytes(tiers.far_used)} far "
        )
    else:
        text += f"memory={as_bytes(tiers.near_used + table.index_bytes)} "
    return f"{text}on {table.backend.name}"


def facts(table: Any, dtype: str) -> dict[str, str]:
    """Returns what a notebook shows of a table.

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
            "near memory of rows and states": as_bytes(tiers.near_used),
            "far memory of rows and states": as_bytes(tiers.far_used),
        }
    else:
        found["memory of rows and states"] = as_bytes(tiers.near_used)
    return found | {
        "memory reserved for more rows": as_bytes(table.store.num_bytes - table.store.used_bytes),
        "memory of the index": as_bytes(table.index_bytes),
    }


def _place(table: Any) -> str:
    """Returns where the rows are; "hbm" is what the kind is called, also without a GPU."""
    if table.backend.name == "cpu":
        return "RAM"
    return "GPU memory" if table.keeps_every_key else "GPU memory and RAM"


def _fill(table: Any) -> str:
    text = f"{table.load_factor:.0%} of {table.capacity:,} slots"
    if table.max_capacity is not None and table.capacity < table.max_capacity:
        text += f" (at most {table.max_capacity:,})"
    return text


def as_bytes(count: int) -> str:
    """Returns a number of bytes in few digits."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
