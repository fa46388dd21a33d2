"""Indices of arrays, as CuPy takes them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.simt import device
from tests.support.simt.arrays import DeviceArray, array, arrays_of, copy_to, launch, view_of


class IndexedArray(DeviceArray):
    """An array that can be indexed."""

    def __getitem__(self, index: Any) -> "IndexedArray":
        place, arrays, axis = _resolved(self, index)
        if not arrays:
            return place
        if len(arrays) == 1 and arrays[0].dtype.kind != "b":
            return place.take(arrays[0], axis)
        shape, where = _selected(place, arrays, axis)
        out = type(self)(shape, self.dtype)
        launch("getitem", [out, place, *arrays], lambda to, a, *at: copy_to(to, a[where(*at)]))
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        place, arrays, axis = _resolved(self, index)
        if not arrays:
            if not isinstance(value, DeviceArray):
                place.fill(value)  # refuses arrays of NumPy's
                return
            np.broadcast_to(value._view, place.shape)
            if _is_same(place._view, value._view):
                return
            check_overlap(place, value)
            launch("setitem", [place, value], copy_to)
            return
        if not isinstance(value, DeviceArray):
            value = array(type(self), value, self.dtype)  # a copy to the device
        value = value.astype(self.dtype, copy=False)
        shape, where = _selected(place, arrays, axis)
        np.broadcast_to(value._view, shape)
        repeats = arrays[0].dtype.kind != "b" and all(a.ndim == 1 for a in arrays)
        assert repeats or arrays[0].dtype.kind == "b" or value.ndim == 0, "not in the stand-in"

        def write(to: np.ndarray, source: np.ndarray, *numbers: np.ndarray) -> None:
            at, source = where(*numbers), np.broadcast_to(source, shape)
            if repeats:  # of an index that repeats any one wins
                order = device.random.permutation(shape[axis])
                shuffled = (np.broadcast_to(a, shape[axis])[order] for a in at[axis:])
                at, source = (*at[:axis], *shuffled), np.take(source, order, axis)
            to[at] = source

        launch("setitem", [place, value, *arrays], write)

    def take(self, indices: Any, axis: int | None = None, out: Any = None) -> "IndexedArray":
        assert out is None, "not in the stand-in"
        if not np.isscalar(indices) and not isinstance(indices, DeviceArray):
            indices = array(type(self), indices, int)  # a copy to the device
        shape = () if np.isscalar(indices) else indices.shape
        if isinstance(indices, DeviceArray) and indices.dtype.kind not in "iu":
            raise TypeError(f"Wrong type of indices: {indices.dtype}")
        if axis is not None:
            axis = range(self.ndim)[axis]
        around = ((), ()) if axis is None else (self.shape[:axis], self.shape[axis + 1 :])
        out = type(self)((*around[0], *shape, *around[1]), self.dtype)
        if self.size == 0 and out.size:
            raise IndexError("cannot do a non-empty take from an empty axes.")

        def take(to: np.ndarray, source: np.ndarray, *numbers: np.ndarray) -> None:
            at = np.asarray(numbers[0] if numbers else indices).astype(np.int64)
            copy_to(to, np.take(source, at, axis, mode="wrap"))

        launch("take", [out, self, *arrays_of([indices])], take)
        return out

    def nonzero(self) -> tuple["IndexedArray", ...]:
        if self.ndim == 0:
            raise ValueError("Calling nonzero on 0d arrays is not allowed.")
        device.count("array operations")
        found = np.argwhere(read_now(self)) if self.size else np.empty((0, self.ndim), np.int64)
        out = type(self)(found.shape, np.int64)
        launch("nonzero", [out, self], lambda to, _: copy_to(to, found))
        return tuple(out[:, i] for i in range(self.ndim))


def read_now(x: DeviceArray) -> np.ndarray:
    """Returns what an array has. CuPy reads a number of it, such as how many are not zero."""
    device.check_device(x.data.device_id)
    device.count("copies to the host")
    device.count("bytes to the host", 8)
    device.wait_to_read(x._view)
    return x._view


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    is_alike = a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype
    return is_alike and device.address_of(a) == device.address_of(b)


def check_overlap(out: DeviceArray, x: DeviceArray) -> None:
    """Refuses what is undefined on a GPU: elements that one thread writes and another reads."""
    if out is x or _is_same(out._view, x._view):
        return
    if np.may_share_memory(out._view, x._view) and np.shares_memory(out._view, x._view):
        raise ValueError("An operation writes elements that it reads in another place.")


def _resolved(x: DeviceArray, index: Any) -> tuple[DeviceArray, list[DeviceArray], int]:
    """Splits an index into a view and the arrays that are left to index it by, side by side.

    Returns:
      (view, arrays, axis of the first array in the view).
    """
    if type(index) is slice and x.ndim:  # most are: what follows takes ten times as long
        return view_of(x, x._view[_host_slice(index)]), [], 0
    items = list(index) if isinstance(index, tuple) else [index]
    for i, item in enumerate(items):
        if item is None or item is Ellipsis or isinstance(item, (slice, DeviceArray)):
            continue
        if np.isscalar(item) and not isinstance(item, (bool, np.bool_)):
            continue
        is_list = isinstance(item, (list, tuple))
        items[i] = array(type(x), item)  # a copy to the device
        if is_list and items[i].size == 0:
            items[i] = items[i].astype(np.int32)
    for i, item in enumerate(items):
        if isinstance(item, slice):
            items[i] = _host_slice(item)
        elif isinstance(item, DeviceArray) and item.dtype.kind not in "biu":
            raise IndexError(
                f"arrays used as indices must be of integer or boolean type. ({item.dtype})"
            )
    taken = sum(
        _width(item) if isinstance(item, DeviceArray) else item is not None
        for item in items
        if item is not Ellipsis
    )
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    if taken > x.ndim:
        raise IndexError(f"too many indices for array: {x.ndim} dimensions, {taken} were indexed")
    at = next(i for i, item in enumerate(items) if item is Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.ndim - taken)
    basic: list[Any] = []
    arrays: list[DeviceArray] = []
    places: list[int] = []
    axis = 0
    for item in items:
        if isinstance(item, DeviceArray):
            arrays.append(item)
            places.append(axis)
            width = _width(item)
            basic += [slice(None)] * width
            axis += width
        else:
            basic.append(item)
            axis += item is None or isinstance(item, slice)
    view = x._view[tuple(basic)]
    if not isinstance(view, np.ndarray):  # NumPy gives a scalar, CuPy an array
        view = x._view[(*basic, Ellipsis)]
    if len(arrays) > 1:
        assert places == list(range(places[0], places[0] + len(places))), "not in the stand-in"
        assert all(a.dtype.kind != "b" for a in arrays), "not in the stand-in"
    for mask in arrays:
        if mask.dtype.kind == "b" and mask.shape != view.shape[places[0] :][: mask.ndim]:
            raise IndexError("boolean index did not match indexed array")
    return view_of(x, view), arrays, places[0] if places else 0


def _host_slice(item: slice) -> slice:
    """Returns a slice whose bounds are integers. One that an array holds is read, with a wait."""
    bounds = (item.start, item.stop, item.step)
    if not any(isinstance(b, DeviceArray) for b in bounds):
        return item
    return slice(*[int(b) if isinstance(b, DeviceArray) else b for b in bounds])


def _selected(
    x: DeviceArray, arrays: list[DeviceArray], axis: int
) -> tuple[tuple[int, ...], Callable[..., tuple[Any, ...]]]:
    """Returns the shape of what a mask, or arrays side by side, select from `axis` on, and what
    gives NumPy's index of their content; what is out of bounds wraps around."""
    before, width = (slice(None),) * axis, sum(map(_width, arrays))
    if arrays[0].dtype.kind == "b":
        (mask,) = arrays
        count = int(np.count_nonzero(read_now(mask))) if mask.size else 0
        return (*x.shape[:axis], count, *x.shape[axis + width :]), lambda m: (*before, m)
    sizes = x.shape[axis:]

    def where(*numbers: np.ndarray) -> tuple[Any, ...]:
        wrapped = [a.astype(np.int64) % max(1, n) for a, n in zip(numbers, sizes, strict=False)]
        return (*before, *wrapped)

    middle = np.broadcast_shapes(*[a.shape for a in arrays])
    return (*x.shape[:axis], *middle, *x.shape[axis + width :]), where


def _width(item: DeviceArray) -> int:
    """Returns how many dimensions an index by an array is of."""
    return item.ndim if item.dtype.kind == "b" else 1
