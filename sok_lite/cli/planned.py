"""Where tables of known sizes go, on machines of known sizes, and whether there is room."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sok_lite.engine.table.parts import MAX_KEYS
from sok_lite.engine.table.sizing import (
    RowBytes,
    TableBytes,
    hbm_bytes,
    hybrid_bytes,
    max_capacity_for,
)

GIB = 1 << 30
# More keys than this many times those planned are not looked for.
MOST_ROOM = 64
_DIGITS = 12  # of the factor of the keys that have room, in bits


class Need(NamedTuple):
    """A table that there is to be.

    Attributes:
      name: of the table.
      num_keys: of all ranks together.
      dim, dtype: of the rows.
      state_size: elements of the optimizer states of a row, together.
      ids: that a row of the batch has for it.
    """

    name: str
    num_keys: int
    dim: int
    dtype: str
    state_size: int
    ids: float = 1.0

    @property
    def row(self) -> RowBytes:
        """Memory of one row."""
        return RowBytes.of(self.dim, self.dtype, self.state_size)


class Machines(NamedTuple):
    """The machines that are to hold the tables.

    Attributes:
      ranks: processes, one for each GPU.
      ranks_of_host: of one machine.
      near, far: bytes that a rank's tables may take of its GPU, and of its host's memory; without a
        GPU near is the host's memory, and there is no far.
    """

    ranks: int
    ranks_of_host: int
    near: int
    far: int


class Planned(NamedTuple):
    """A table as it is to be made.

    Attributes:
      need: what it is for.
      num_keys: on the rank that has most.
      max_capacity: of a "hybrid" table; None: it is an "hbm" table.
      max_hbm_for_vectors: of a "hybrid" table, in GiB.
      bytes: its memory on that rank.
    """

    need: Need
    num_keys: int
    max_capacity: int | None
    max_hbm_for_vectors: float | None
    bytes: TableBytes


class Plan(NamedTuple):
    """All tables on the machines.

    Attributes:
      machines: the argument.
      tables: as they are to be made.
      too_many: names of tables that have more keys than one rank can hold.
    """

    machines: Machines
    tables: list[Planned]
    too_many: list[str]

    @property
    def near(self) -> int:
        """Near memory of a rank."""
        return sum(table.bytes.near for table in self.tables)

    @property
    def far(self) -> int:
        """Far memory of a rank."""
        return sum(table.bytes.far for table in self.tables)

    @property
    def fits(self) -> bool:
        """Whether there is room for all."""
        has_room = self.near <= self.machines.near and self.far <= self.machines.far
        return has_room and not self.too_many


def plan(needs: Sequence[Need], machines: Machines) -> Plan:
    """Returns where tables are to be: near as far as they have room, the largest in two tiers.

    Where there is no room it is the plan that lacks least.
    """
    order = sorted(range(len(needs)), key=lambda i: -needs[i].num_keys * needs[i].row.total)
    counts = range(len(needs) + 1) if machines.far else range(1)
    for num_hybrid in counts:
        found = _with_tiers(needs, set(order[:num_hybrid]), machines)
        if found.fits:
            break
    return found


def room(needs: Sequence[Need], machines: Machines) -> float:
    """Returns how many times as many keys have room, up to `MOST_ROOM`; rounded down."""

    def fits(factor: float) -> bool:
        more = [need._replace(num_keys=math.ceil(need.num_keys * factor)) for need in needs]
        return plan(more, machines).fits

    if fits(MOST_ROOM):
        return MOST_ROOM
    low, high = 0.0, float(MOST_ROOM)
    for _ in range(_DIGITS + MOST_ROOM.bit_length()):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def keys_of_rank(num_keys: int, ranks: int) -> int:
    """Returns how many of the keys the rank has that has most.

    Ranks differ by chance: four standard deviations above the mean.
    """
    mean = num_keys / ranks
    return math.ceil(mean + (4 * math.sqrt(mean) if ranks > 1 else 0))


def _with_tiers(needs: Sequence[Need], in_tiers: set[int], machines: Machines) -> Plan:
    """Returns a plan in which some tables have two tiers and the others are near."""
    counts = [keys_of_rank(need.num_keys, machines.ranks) for need in needs]
    pairs = list(zip(needs, counts, strict=True))
    capacities = [
        max_capacity_for(count) if i in in_tiers else None for i, count in enumerate(counts)
    ]
    too_many = [need.name for need, count in pairs if count > MAX_KEYS]
    too_many += [needs[i].name for i in in_tiers if capacities[i] is None]
    least = [
        hbm_bytes(count, need.row)
        if capacity is None
        else hybrid_bytes(count, need.row, capacity, 0)
        for (need, count), capacity in zip(pairs, capacities, strict=True)
    ]
    # What is left of the near memory is dealt to the tables of two tiers by their size.
    left = machines.near - sum(size.near for size in least)
    all_near = [
        0 if capacity is None else hybrid_bytes(count, need.row, capacity, count).near - size.near
        for (need, count), capacity, size in zip(pairs, capacities, least, strict=True)
    ]
    share = min(1.0, max(0.0, left / max(1, sum(all_near))))
    tables = []
    for (need, count), capacity, size in zip(pairs, capacities, least, strict=True):
        if capacity is None:
            tables.append(Planned(need, count, None, None, size))
            continue
        gigabytes = _rounded_down(share * count * need.row.row / GIB)
        near_rows = int(gigabytes * GIB / need.row.row)
        size = hybrid_bytes(count, need.row, capacity, near_rows)
        tables.append(Planned(need, count, capacity, gigabytes, size))
    return Plan(machines, tables, sorted(set(too_many)))


def _rounded_down(number: float) -> float:
    """Returns a number of three digits that is not above another."""
    if number <= 0:
        return 0.0
    places = 2 - math.floor(math.log10(number))
    return round(math.floor(number * 10**places) / 10**places, max(0, places))


class Sent(NamedTuple):
    """Bytes that a rank sends to others in a step of training, at most."""

    keys: int
    rows: int
    gradients: int

    @property
    def total(self) -> int:
        """Bytes of keys, rows and gradients."""
        return sum(self)


def sent(needs: Sequence[Need], ranks: int, batch: int) -> Sent:
    """Returns what a rank sends to others in a step if no id of its batch comes twice.

    Args:
      batch: rows of the step, of all ranks together.
    """
    keys = rows = gradients = 0.0
    for need in needs:
        others = batch * need.ids / ranks * (ranks - 1) / ranks
        keys += others * 8
        rows += others * need.row.row
        gradients += others * need.dim * 4
    return Sent(*map(math.ceil, (keys, rows, gradients)))
