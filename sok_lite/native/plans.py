"""Plans of native lookups, updates and writes.

See kernels/ops/plan.h. A plan holds no table: it has the addresses of the tables' records, which
are never freed, and their generations, which identify the tables.
"""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import addressof
from enum import IntEnum
from typing import Any, NamedTuple

from sok_lite.backend import Array, Backend
from sok_lite.backend.arguments import WORDS
from sok_lite.backend.launches import Launch
from sok_lite.engine.hashing import seed_of_process
from sok_lite.engine.table.insert import most_new_items
from sok_lite.engine.work_counters import WorkCounter
from sok_lite.native.callbacks import Call, call_of, operations
from sok_lite.native.gpu import record_of


class Rows(IntEnum):
    """Format of the rows of a batch, or of its weights; as in kernels/ops/plan.h."""

    NONE = 0  # weights: none
    EVEN = 1  # equal numbers of ids
    RAGGED = 2  # row splits
    SPARSE = 3  # indices
    AS_KEYS = 4  # weights: rows of the keys


class Drawing(NamedTuple):
    """A launch for initial values of rows: a kernel of initializer.cu, and its arguments.

    Attributes:
      kernel, num_arguments: its address, and its number of arguments.
      words: its arguments, (num_arguments,) int64; native code fills in those of a call.
      arrays: owners of addresses among them.
    """

    kernel: int
    num_arguments: int
    takes_keys: bool
    words: Sequence[int]
    arrays: Any

    @staticmethod
    def of(launch: Launch, keys: Array) -> "Drawing":
        """Returns the launch of an initializer for `keys`."""
        backend, arguments = launch.backend, launch.args.arguments
        kernel, num_arguments = backend.kernel(launch.kernel)
        words = backend.words_of(launch.kernel, arguments)
        takes_keys = any(each is keys for each in arguments)
        return Drawing(kernel, num_arguments, takes_keys, words, arguments)


class Part(NamedTuple):
    """One table of a lookup, as the words of a plan.

    Attributes:
      record, generation: the address of the table's record, and the table's generation.
      key_type, row_type: TensorFlow's dtype numbers, of the lookup.
      combiner: the number in COMBINERS.
      row_length: ids per row for even rows.
      drawing: writes initial values to an array; None: only Python can.
      beginning: writes initial values to rows.
    """

    record: int
    generation: int
    key_type: int
    row_type: int
    dim: int
    combiner: int = 0
    rows: Rows = Rows.NONE
    row_length: int = 0
    weight_rows: Rows = Rows.NONE
    drawing: Drawing | None = None
    beginning: Drawing | None = None


class Policy(NamedTuple):
    """What a lookup does with keys that have no row: `MissingKeyPolicy`; -1: None, 1: "zeros"."""

    training: int
    missing: int
    has_filter: int
    reading_only: int
    is_in_pipeline: int


_KERNELS = (
    *("find", "find_and_pool", "rows_read_u16", "rows_read_u32", "rows_read_u64"),
    *("combine_items", "segment_sums", "segment_add_pieces"),
    *(f"combine_weight_grad_{suffix}" for suffix in ("f32", "f16", "bf16", "f64")),
    *(f"pool_again_{suffix}" for suffix in ("f32", "f16", "bf16", "f64")),
    *(f"rows_write_u{bits}" for bits in (8, 16, 32, 64)),
    *(f"rows_add_{suffix}" for suffix in ("f32", "f16", "bf16")),
    *("det_insert_items", "det_erase", "slots_tell_rows", "rows_fill", "hkv_erase"),
    *("hkv_insert", "slots_claim_rows"),
    *(f"rows_deliver_u{bits}" for bits in (8, 16, 32, 64)),
    *(*(f"pool_{suffix}" for suffix in ("f32", "f16", "bf16", "f64")), "find_with_hint"),
    *("dedup_insert", "dedup_number_tiles", "dedup_labels", "sort_pass", "group_sorted"),
    *("give_distinct", "hkv_insert_items", "dedup_firsts", "group_firsts"),
)
# Launched by native code only, and only on a GPU.
_ON_GPU_ALONE = {"dedup_number_tiles", "dedup_labels", "sort_pass", "group_sorted"}
_ON_GPU_ALONE |= {"hkv_insert_items", "dedup_firsts", "group_firsts"}
_ON_GPU = {"find", "combine_items", "segment_sums", "segment_add_pieces", "find_with_hint"}
_ON_GPU |= {"dedup_insert", "give_distinct"} | _ON_GPU_ALONE
_ON_GPU |= {"det_insert_items", "det_erase", "slots_tell_rows", "rows_fill", "hkv_erase"}
# One per dtype.
_SEVERAL = (
    *("rows_read_", "combine_weight_grad_", "pool_f", "pool_bf16"),
    *("rows_deliver_", "pool_again_"),
)
_ON_GPU |= {name for name in _KERNELS if name.startswith(_SEVERAL)}
_NUMBERS = ("launch", "num_threads", "grain", "pieces", "may_spin")


class _Driver(ctypes.Structure):
    """The interface of the kernels' library; as in kernels/ops/plan.h."""

    _fields_ = (
        *[(name, ctypes.c_int64) for name in ("gpu", *_NUMBERS, "seed", "most_new_items")],
        *[(name, ctypes.c_int64 * 2) for name in _KERNELS],
    )


# By id of the backend; plans have the address.
_drivers: dict[int, tuple[Backend, _Driver]] = {}


def _driver_of(backend: Any) -> _Driver:
    known = _drivers.get(id(backend))
    if known is None:
        gpu = None if backend.name == "cpu" else record_of(backend)
        assert backend.name == "cpu" or gpu is not None, "Python launches, and makes no plan"
        driver = _Driver(seed=seed_of_process(), gpu=0 if gpu is None else addressof(gpu))
        driver.most_new_items = most_new_items(backend)
        for name in _KERNELS:
            if name in _ON_GPU if gpu is not None else name not in _ON_GPU_ALONE:
                setattr(driver, name, backend.kernel(name))
        # Another thread may have made one, whose address is in plans.
        known = _drivers.setdefault(id(backend), (backend, driver))
    _, driver = known
    if backend.name == "cpu":
        for name, number in zip(_NUMBERS, backend.launching(), strict=True):
            setattr(driver, name, number)
    return driver


class LookupPlan(NamedTuple):
    """A lookup that native code may do.

    Attributes:
      is_pooled: whether rows of one or more tables are pooled; else one table's are returned.
      work, gradient_work: counters of it and its gradient; None: not counted.
      tells_found: whether it also returns which keys have a row, uint8; not with pooled rows.
    """

    backend: Any
    is_pooled: bool
    work: WorkCounter | None
    gradient_work: WorkCounter | None
    policy: Policy
    parts: tuple[Part, ...]
    tells_found: bool = False

    def note(self, number: int) -> bool:
        """Registers it for a call's number. Returns whether native code accepts it."""
        driver = addressof(_driver_of(self.backend))
        works = (self.work, self.gradient_work)
        counters = (0 if each is None else addressof(each.native) for each in works)
        words = [driver, int(self.is_pooled), int(self.tells_found), *counters, *self.policy]
        words.append(len(self.parts))
        for *numbers, drawing, beginning in self.parts:
            words += numbers
            for each in (drawing, beginning):
                if each is None:
                    words += (0, 0, 0)
                else:
                    kernel, count, takes_keys, its, _ = each
                    words += (kernel, count, int(takes_keys), *its)
        return _register("sok_ops_plan", number, words)


class Writing(IntEnum):
    """What a write does with the rows of its keys; as in kernels/ops/plan.h."""

    ASSIGNS = 0
    ADDS = 1


class WritePlan(NamedTuple):
    """A write to rows of one table that native code may do.

    Attributes:
      begins_lookup: whether it would insert keys, so that it counts as a lookup.
      has_flags: whether flags follow the keys: whether each must exist.
      subtracts: whether rows to subtract from the summand follow.
      scale: factor of the summand.
      part: the table; its rows are assigned in `row_type`.
    """

    backend: Any
    writing: Writing
    begins_lookup: bool
    has_flags: bool
    subtracts: bool
    scale: float
    part: Part

    def note(self, number: int) -> bool:
        """Registers it for a call's number. Returns whether native code accepts it."""
        (scale,) = _words(struct.pack("d", self.scale))
        how = (self.writing, self.begins_lookup, self.has_flags, self.subtracts, scale)
        words = [addressof(_driver_of(self.backend)), *map(int, how), *self.part[:5]]
        return _register("sok_ops_plan_write", number, words)


class UpdatePart(NamedTuple):
    """One table of an update, as the words of a plan.

    Attributes:
      record, generation: the address of the table's record, and the table's generation.
      states_number: from the record of its store.
      key_type: TensorFlow's dtype number of the keys.
      is_of_gradient: whether its keys always come from one of our gradients.
      kernel, num_arguments: the address of the rule's kernel, and its number of arguments.
      states: addresses of the columns' records in the kernel's order; 0 for missing ones.
    """

    record: int
    generation: int
    states_number: int
    key_type: int
    dim: int
    is_of_gradient: bool
    decays: bool
    is_stochastic: bool
    seed: int
    kernel: int
    num_arguments: int
    states: tuple[int, ...]


class UpdatePlan(NamedTuple):
    """An update that native code may do like Python's update before.

    Attributes:
      num_nonfinite: address of (1,) int64, never freed, a counter of non-finite rows.
      taken: address of an int64, never freed, that receives the number of a step when its rows
        change; 0: none.
      gradient: number of the lookup's call whose gradient the update takes itself; 0: none.
      settings: the optimizer's numbers in that update except the learning rate; float64.
      counting: index of the step counter in settings, and field of the rule; (-1, -1): none.
      undecayed, decayed: the fields of the rule without and with weight decay.
      parts: of each table, all distinct.
    """

    backend: Any
    work: WorkCounter
    num_nonfinite: int
    taken: int
    gradient: int
    rule: int
    settings: bytes
    counting: tuple[int, int]
    undecayed: bytes
    decayed: bytes
    parts: tuple[UpdatePart, ...]

    def note(self, number: int) -> None:
        """Gives it to native code, for the next update of the call of a number.

        Where that call is gone nothing is done.
        """
        call = call_of(number)
        if call is None:
            return
        driver, work = addressof(_driver_of(self.backend)), addressof(self.work.native)
        words: list[int] = [driver, work, self.num_nonfinite, self.taken, self.gradient, self.rule]
        settings, undecayed, decayed = map(_words, (self.settings, self.undecayed, self.decayed))
        words += [len(settings), *settings, *self.counting]
        words += [len(decayed), *undecayed, *decayed]
        words += [len(self.parts[0].states), len(self.parts)]
        for *fields, states in self.parts:
            words += [*map(int, fields), *states]
        operations().library.sok_ops_plan_update(
            ctypes.c_int64(call.number), WORDS[len(words)](*words)
        )


def _register(function: str, number: int, words: Sequence[int]) -> bool:
    note = getattr(operations().library, function)
    return bool(note(ctypes.c_int64(number), WORDS[len(words)](*words)))


def forget_plan(number: int) -> None:
    """Removes the plan of a call."""
    operations().library.sok_ops_forget(ctypes.c_int64(number))


def _words(floats: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(floats) // 8}q", floats)


class NativeCall(Call):
    """A call that native code may do once it has a plan, as long as this object lives."""

    __slots__ = ()

    def __del__(self) -> None:
        if operations is None or not hasattr(self, "number"):
            return  # Python is exiting, or `__init__` was interrupted
        forget_plan(self.number)


class PlannedCall(NativeCall):
    """A lookup or write that native code may do from the start; RuntimeError for old kernels."""

    __slots__ = ("_plan",)

    def __init__(self, plan: LookupPlan | WritePlan, *args: Any) -> None:
        super().__init__(*args)
        self._plan = plan  # keeps the arrays of drawings
        if not plan.note(self.number):
            raise RuntimeError(
                "sok_lite's kernels must be of the version of its operations. Received: kernels "
                "that take other arguments. Install sok_lite again: its files are of two versions."
            )


def set_mode(mode: int) -> None:
    """Sets the state of `inference_mode` in native code.

    Args:
      mode: 0: not open; 1: open; 2 and 3: open, and a missing key returns "initial" or "zeros".
    """
    operations().library.sok_ops_set_mode(ctypes.c_int64(mode))


def num_entries() -> int:
    """Returns how often operations have entered Python in this process."""
    return int(operations().library.sok_ops_entries())
