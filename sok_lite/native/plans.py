"""Plans of what native code does by itself: lookups, updates and writes.

kernels/ops/plan.h says what a plan is. It holds no table: it knows the tables' records, which are
never freed, and by their generation whether they still are the same tables'.
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
from sok_lite.engine.work_done import WorkDone
from sok_lite.native.callbacks import Call, call_of, operations
from sok_lite.native.gpu import record_of


class Rows(IntEnum):
    """How the rows of a batch are given, or those of its weights; as in kernels/ops/plan.h."""

    NONE = 0  # of weights: there are none
    EVEN = 1  # all have as many ids
    RAGGED = 2  # row splits
    SPARSE = 3  # indices
    AS_KEYS = 4  # of weights


class Drawing(NamedTuple):
    """What the rows of keys begin with: a kernel of initializer.cu, and its arguments.

    Attributes:
      kernel, num_arguments: its address, and how many arguments it takes.
      takes_keys: whether these are among them.
      words: its arguments, (num_arguments,) int64; those of a call are left to native code.
      arrays: whose addresses are among them.
    """

    kernel: int
    num_arguments: int
    takes_keys: bool
    words: Sequence[int]
    arrays: Any

    @staticmethod
    def of(launch: Launch, keys: Array) -> "Drawing":
        """Returns the launch of an initializer, for the keys that it is given."""
        backend, arguments = launch.backend, launch.part.arguments
        kernel, num_arguments = backend.kernel(launch.kernel)
        words = backend.words_of(launch.kernel, arguments)
        takes_keys = any(each is keys for each in arguments)
        return Drawing(kernel, num_arguments, takes_keys, words, arguments)


class Part(NamedTuple):
    """One table of a lookup, as the words of a plan.

    Attributes:
      record, generation: the address of the table's record, and what says whose it is.
      key_type, row_type: TensorFlow's numbers of types; of what is looked up.
      dim, combiner: of the rows; the number of COMBINERS.
      rows, row_length: how the rows of the batch are given; of even ones the ids of each.
      weight_rows: how those of the weights are.
      drawing: what draws initial values into an array; None: only Python can.
      beginning: what draws them into rows.
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
    """What a lookup does with keys that have no row, as numbers; -1 stands for None.

    Attributes:
      training, missing, has_filter, reading_only: those of `MissingKeyPolicy`; 1 is "zeros".
      is_in_pipeline: whether it is in a function of tf.data.
    """

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
    *("det_insert_items", "det_erase", "slots_tell_rows", "rows_fill"),
    *("hkv_insert", "hkv_erase", "slots_claim_rows"),
    *(f"rows_deliver_u{bits}" for bits in (8, 16, 32, 64)),
    *(*(f"pool_{suffix}" for suffix in ("f32", "f16", "bf16", "f64")), "recall_rows"),
    *("dedup_insert", "dedup_number_tiles", "dedup_labels", "sort_pass", "group_sorted"),
    "give_distinct",
)
# Those that native code launches on a GPU alone, and nowhere else.
_ON_GPU_ALONE = {"dedup_number_tiles", "dedup_labels", "sort_pass", "group_sorted"}
_ON_GPU = {"find", "combine_items", "segment_sums", "segment_add_pieces", "recall_rows"}
_ON_GPU |= {"dedup_insert", "give_distinct"} | _ON_GPU_ALONE
_ON_GPU |= {"det_insert_items", "det_erase", "slots_tell_rows", "rows_fill"}
# One of each type.
_SEVERAL = (
    *("rows_read_", "combine_weight_grad_", "pool_f", "pool_bf16"),
    *("rows_deliver_", "pool_again_"),
)
_ON_GPU |= {name for name in _KERNELS if name.startswith(_SEVERAL)}
_NUMBERS = ("launch", "num_threads", "grain", "pieces", "may_spin")


class _Driver(ctypes.Structure):
    """What the library of kernels has; as in kernels/ops/plan.h."""

    _fields_ = (
        *[(name, ctypes.c_int64) for name in ("gpu", *_NUMBERS, "seed", "most_new_items")],
        *[(name, ctypes.c_int64 * 2) for name in _KERNELS],
    )


# Of each backend, by its number: plans have the address.
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
        # Another thread may have made one meanwhile, which plans have the address of.
        known = _drivers.setdefault(id(backend), (backend, driver))
    _, driver = known
    if backend.name == "cpu":
        for name, number in zip(_NUMBERS, backend.launching(), strict=True):
            setattr(driver, name, number)
    return driver


class LookupPlan(NamedTuple):
    """A lookup that native code may do.

    Attributes:
      backend: of all tables.
      is_pooled: whether rows are pooled, by all of several tables; else those of one table are
        given as they are.
      work, gradient_work: what counts it, and its gradient; None: nothing does.
      policy: for keys without a row.
      parts: of each table.
      tells_found: whether it gives, too, which keys have a row, uint8; not of pooled rows.
    """

    backend: Any
    is_pooled: bool
    work: WorkDone | None
    gradient_work: WorkDone | None
    policy: Policy
    parts: tuple[Part, ...]
    tells_found: bool = False

    def note(self, number: int) -> bool:
        """Gives it to native code, for the call of a number. Returns whether that takes it."""
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
        return _noted("sok_ops_plan", number, words)


class Writing(IntEnum):
    """What a write does with the rows of its keys; as in kernels/ops/plan.h."""

    ASSIGNS = 0
    ADDS = 1


class WritePlan(NamedTuple):
    """A write to rows of one table that native code may do.

    Attributes:
      backend: of the table.
      writing: what it does.
      begins_lookup: whether it would insert keys, so that it counts as a lookup.
      has_flags: whether the keys are followed by flags, of each whether it is to be there.
      subtracts: whether rows follow that are subtracted from those that are added.
      scale: what is added is multiplied by it.
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
        """Gives it to native code, for the call of a number. Returns whether that takes it."""
        (scale,) = _words(struct.pack("d", self.scale))
        how = (self.writing, self.begins_lookup, self.has_flags, self.subtracts, scale)
        words = [addressof(_driver_of(self.backend)), *map(int, how), *self.part[:5]]
        return _noted("sok_ops_plan_write", number, words)


class UpdatePart(NamedTuple):
    """One table of an update, as the words of a plan.

    Attributes:
      record, generation: the address of the table's record, and what says whose it is.
      states_number: of the record of its store.
      key_type: TensorFlow's number, of the keys.
      dim: of the rows.
      is_of_gradient: whether its keys are always those of one of our gradients.
      decays: whether weight decay acts on it.
      is_stochastic, seed: whether rows are rounded by random bits, and the seed of these.
      kernel, num_arguments: the address of the rule's kernel for its rows, and how many it takes.
      states: as the kernel takes them, addresses of the columns' records; 0 for what is not there.
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
    """An update that native code may do as Python did the one before it.

    Attributes:
      backend: of all tables.
      work: what counts it.
      num_nonfinite: the address of (1,) int64, never freed, to which non-finite rows are added.
      taken: the address of an int64, never freed either, that gets the number of a step with its
        rows; 0: there is none.
      rule: its number.
      settings: the optimizer's numbers in that update, but for the learning rate; float64.
      counting: which of them counts steps, and which field of the rule it is; (-1, -1): none does.
      undecayed, decayed: the fields of the rule of tables without weight decay, and with it.
      parts: of each table, all different.
    """

    backend: Any
    work: WorkDone
    num_nonfinite: int
    taken: int
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
        words: list[int] = [driver, work, self.num_nonfinite, self.taken, self.rule]
        settings, undecayed, decayed = map(_words, (self.settings, self.undecayed, self.decayed))
        words += [len(settings), *settings, *self.counting]
        words += [len(decayed), *undecayed, *decayed]
        words += [len(self.parts[0].states), len(self.parts)]
        for *fields, states in self.parts:
            words += [*map(int, fields), *states]
        operations().library.sok_ops_plan_update(
            ctypes.c_int64(call.number), WORDS[len(words)](*words)
        )


def _noted(function: str, number: int, words: Sequence[int]) -> bool:
    note = getattr(operations().library, function)
    return bool(note(ctypes.c_int64(number), WORDS[len(words)](*words)))


def forget_plan(number: int) -> None:
    """Has a call no plan any more."""
    operations().library.sok_ops_forget(ctypes.c_int64(number))


def _words(floats: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(floats) // 8}q", floats)


class NativeCall(Call):
    """A call that native code may do once it has a plan, as long as this is there."""

    __slots__ = ()

    def __del__(self) -> None:
        if operations is None or not hasattr(self, "number"):
            return  # Python is ending, or it was interrupted before it had begun
        forget_plan(self.number)


class PlannedCall(NativeCall):
    """A lookup or a write that native code may do from the start.

    Args:
      plan: of it.
      The others: as of `Call`.

    Raises:
      RuntimeError: the library of kernels is of another version than that of operations.
    """

    __slots__ = ("_plan",)

    def __init__(self, plan: LookupPlan | WritePlan, *args: Any) -> None:
        super().__init__(*args)
        self._plan = plan  # it has the arrays of drawings
        if not plan.note(self.number):
            raise RuntimeError(
                "sok_lite's kernels must be of the version of its operations. Received: kernels "
                "that take other arguments. Install sok_lite again: its files are of two versions."
            )


def set_mode(mode: int) -> None:
    """Tells native code what blocks of `inference_mode` say.

    Args:
      mode: 0: none is open; 1: one is; 2 and 3: one is, by which a missing key gives "initial" or
        "zeros".
    """
    operations().library.sok_ops_set_mode(ctypes.c_int64(mode))


def num_entries() -> int:
    """Returns how often operations have entered Python in this process."""
    return int(operations().library.sok_ops_entries())
