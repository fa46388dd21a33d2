"""The simulated GPU runs correct programs, in many orders, and names what is wrong in others."""

import re

import numpy as np
import pytest

from tests.support.simt import compiler, runtime

SEEDS = range(24)
HEADER = """
typedef long long i64;
typedef unsigned int u32;
#define KERNEL extern "C" __global__ void
"""


@pytest.fixture
def memory():
    """Returns a function that makes an array known to kernels; forgotten after the test."""
    arrays = []

    def known(array, what="an array"):
        array = np.ascontiguousarray(array)
        runtime.add_memory(array.ctypes.data, array.nbytes, what)
        arrays.append(array)
        return array

    yield known
    for array in arrays:
        runtime.remove_memory(array.ctypes.data)


def program(body):
    return runtime.Program(compiler.compile_source(HEADER + body, ("--std=c++17",)))


def run(body, arguments, grid=1, block=64, seed=0, name="k"):
    runtime.set_seed(seed)
    words = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    words = [word.to_bytes(8, "little") for word in words]
    return program(body).kernel(name).run(grid, block, words)


# A lock that each lane takes for itself; the loser goes round, and never waits inside.
LOCK = """
KERNEL k(int* lock, int* counter) {
  bool is_done = false;
  while (!is_done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      *counter = *(volatile int*)counter + 1;
      __threadfence();
      atomicCAS(lock, 1, 0);
      is_done = true;
    }
  }
}"""


@pytest.mark.parametrize(
    "gone, instead, stale",
    [
        *(("", "", 0), ("", "", 1)),  # atomics are never stale
        *(("atomicCAS(lock, 0, 1) == 0", "true", 0), ("__threadfence();", "", 0)),
    ],
)
def test_an_increment_is_lost_without_the_lock_or_the_fence_alone(memory, gone, instead, stale):
    runtime.set_stale_loads(stale)
    body, ends = LOCK.replace(gone, instead) if gone else LOCK, set()
    for seed in SEEDS:
        lock, counter = memory(np.zeros(1, np.int32)), memory(np.zeros(1, np.int32))
        run(body, [lock, counter], 2, 64, seed)
        ends.add(int(counter[0]))
    assert ends == {128} if not gone else min(ends) < 128


def test_a_seed_is_an_order(memory):
    body = (
        "KERNEL k(int* t, int* o) {"
        "  o[atomicAdd(t, 1)] = (int)(blockIdx.x * blockDim.x + threadIdx.x); }"
    )
    orders = []
    for seed in [*range(8), *range(8)]:
        ticket, order = memory(np.zeros(1, np.int32)), memory(np.zeros(256, np.int32))
        run(body, [ticket, order], 2, 128, seed)
        assert sorted(order.tolist()) == list(range(256))
        orders.append(tuple(order.tolist()))
    assert orders[:8] == orders[8:] and len(set(orders)) > 4


# ------------------------------------------------------------------------- what must be found


# A kernel of one block, how many threads that has, and what is said of it.
WRONG = {
    "masks that differ": (
        "KERNEL k(int* x) { x[threadIdx.x] = (int)__ballot_sync(threadIdx.x ? ~0u : 3u, 1); }",
        *(32, r"in another call"),
    ),
    "a flag that nobody sets": (
        "KERNEL k(int* x) { while (*(volatile int*)x == 0) {} }",
        *(64, r"no progress: nothing has changed.*(lanes 0-31 run, last at|have not begun)"),
    ),
    "lanes that do not come to a sync": (
        "KERNEL k(int* x) { if (threadIdx.x != 40) __syncthreads(); }",
        *(64, r"__syncthreads\(\).*(waits for thread 40.*has left|where lanes have left)"),
    ),
    "two syncs": (
        "KERNEL k(int* x) { if (threadIdx.x < 32) { __syncthreads(); x[0] = 1; }"
        " else { __syncthreads(); x[1] = 2; } }",
        *(64, r"__syncthreads\(\).* is in another: __syncthreads\(\)"),
    ),
    "more shared memory than a block has": (
        "struct Team { int x[8192]; };"
        "KERNEL k(int* x) { __shared__ Team a; __shared__ Team b; a.x[0] = b.x[0] = x[0]; }",
        *(32, r"65536 bytes of shared memory: a block has 48 KiB"),
    ),
    "a read behind the end of shared memory": (
        "struct Team { int x[8]; };"
        "KERNEL k(int* x) { __shared__ Team team; x[0] = (&team)[1].x[0]; }",
        *(1, r"read of 4 bytes.*behind the end of what block 0 shares"),
    ),
    "a write behind the end": (
        "KERNEL k(int* x) { x[64] = 1; }",
        *(1, r"write of 4 bytes.*behind the end of the array x.*k \(kernel.cu:5\).*seed"),
    ),
    "16 bytes that begin in the midst of 16": (
        "struct alignas(16) W { i64 a, b; };"
        "KERNEL k(W* x) { W* y = (W*)((i64*)x + 1); y[1] = *y; }",
        *(1, r"misaligned access of 16 bytes"),
    ),
}


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(memory, name):
    runtime.set_limits(idle=50_000)
    body, block, text = WRONG[name]
    at = np.zeros(68, np.int32)
    x = memory(at[-(at.ctypes.data // 4) % 4 :][:64], "the array x")  # on 16 bytes
    with pytest.raises(runtime.SimtError) as error:
        run(body, [x], block=block)
    assert re.search(text, str(error.value), re.DOTALL)
