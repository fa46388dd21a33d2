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


# ----------------------------------------------------------------------------- what must work


@pytest.mark.parametrize("grid, block", [(1, 33), (7, 256), (5, 1024)])
def test_every_thread_of_every_block_runs_once(memory, grid, block):
    count = memory(np.zeros(grid * block, np.int32))
    run("KERNEL k(int* p) { atomicAdd(p + blockIdx.x * blockDim.x + threadIdx.x, 1); }",
        [count], grid, block)  # fmt: skip
    assert (count == 1).all()


@pytest.mark.parametrize("width", [1, 4, 32])
def test_votes_and_shuffles(memory, width):
    body = """
    KERNEL k(const int* x, u32* votes, int* first, int* sums, i64 width) {
      u32 lane = threadIdx.x & 31u, part = lane & ~((u32)width - 1u);
      u32 mask = (width == 32 ? ~0u : ((1u << width) - 1u) << part);
      int mine = x[threadIdx.x];
      votes[threadIdx.x] = __ballot_sync(mask, mine > 0);
      first[threadIdx.x] = __shfl_sync(mask, mine, 0, width);
      i64 sum = mine;
      for (int d = (int)width / 2; d > 0; d /= 2) sum += __shfl_xor_sync(mask, sum, d, width);
      sums[threadIdx.x] = (int)sum;
    }"""
    for seed in range(4):
        x = memory(np.random.default_rng(seed).integers(-9, 9, 96).astype(np.int32))
        votes, first, sums = (memory(np.zeros(96, t)) for t in (np.uint32, np.int32, np.int32))
        run(body, [x, votes, first, sums, width], 1, 96, seed)
        for begin in range(0, 96, width):
            part = slice(begin, begin + width)
            bits = sum(1 << (begin % 32 + i) for i in range(width) if x[begin + i] > 0)
            found = [set(each[part].tolist()) for each in (votes, first, sums)]
            assert found == [{bits}, {x[begin]}, {x[part].sum()}]


def test_atomics_lose_nothing(memory):
    body = """
    KERNEL k(int* p, unsigned long long* q) {
      int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
      atomicAdd(p, i); atomicMin(p + 1, i); atomicMax(p + 2, i); atomicAdd(q, 1ull << 33);
      for (;;) {  // adds by exchange
        unsigned long long seen = *(volatile unsigned long long*)(q + 1);
        if (atomicCAS(q + 1, seen, seen + 2) == seen) break;
      }
    }"""
    for seed in range(6):
        p, q = memory(np.array([0, 999, -1], np.int32)), memory(np.zeros(2, np.uint64))
        run(body, [p, q], 3, 96, seed)
        assert p.tolist() == [288 * 287 // 2, 0, 287]
        assert q.tolist() == [288 << 33, 576]


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


RELEASE = 'asm volatile("st.release.gpu.s64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");'


@pytest.mark.parametrize(
    "store, seen", [(RELEASE, {-1, 7}), ("*(volatile i64*)flag = value;", {-1, 0, 7})]
)
def test_a_message_needs_a_release(memory, store, seen):
    body = """
    KERNEL k(i64* flag, int* data, int* seen) {
      i64 value = 1;
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        data[0] = 7;
        STORE
        for (int i = 0; i < 8; ++i) atomicAdd(data + 1, 1);  // time passes
      }
      for (int i = 0; i < 4; ++i) {
        asm volatile("ld.acquire.gpu.s64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
        if (value) break;
      }
      seen[blockIdx.x * blockDim.x + threadIdx.x] = value ? data[0] : -1;
    }""".replace("STORE", store)
    found = set()
    for seed in range(200):
        flag, data = memory(np.zeros(1, np.int64)), memory(np.zeros(2, np.int32))
        results = memory(np.zeros(64, np.int32))
        run(body, [flag, data, results], 2, 32, seed)
        found.update(results.tolist())
    assert found == seen


SPIN = """
KERNEL k(int* flag, int* data, int* seen) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *(volatile int*)flag = 1;
  while (LOAD == 0) atomicAdd(data, 1);
  seen[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}"""


@pytest.mark.parametrize("load, ends", [("*(volatile int*)flag", True), ("*flag", False)])
def test_a_plain_load_is_nothing_to_spin_on(memory, load, ends):
    runtime.set_stale_loads(1)
    runtime.set_limits(launch=100_000)
    never = 0
    for seed in range(12):
        flag, data, seen = (memory(np.zeros(n, np.int32)) for n in (1, 1, 64))
        try:
            run(SPIN.replace("LOAD", load), [flag, data, seen], 2, 32, seed)
            assert seen.all()
        except runtime.SimtError as error:
            assert "no progress" in str(error)
            never += 1
    assert (never == 0) == ends


# Lanes of a block read what others have, twice, in memory that they share.
SHARED = """
struct Values { int x[96]; };
struct Number { int x; };
KERNEL k(int* out) {
  __shared__ Values values;
  __shared__ Number number;
  int mine = (int)threadIdx.x, sum = 0;
  if (mine == 0) number.x = (int)blockIdx.x;
  for (int turn = 0; turn < 2; ++turn) {
    values.x[mine] = mine + 100 * turn;
    __syncthreads();
    sum += values.x[blockDim.x - 1 - mine];
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + mine] = 1000 * number.x + sum;
}"""


@pytest.mark.parametrize("gone", [None, 0, 1])
def test_lanes_of_a_block_share_memory_between_two_syncs(memory, gone):
    parts, wrong = SHARED.split("__syncthreads();"), 0
    if gone is not None:
        parts[gone : gone + 2] = [parts[gone] + parts[gone + 1]]
    for seed in SEEDS:
        out = memory(np.zeros(4 * 96, np.int32))
        run("__syncthreads();".join(parts), [out], 4, 96, seed)
        expected = 1000 * np.arange(4)[:, None] + 100 + 2 * np.arange(95, -1, -1)
        wrong += not np.array_equal(out.reshape(4, 96), expected)
    assert (wrong == 0) == (gone is None)


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


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(memory, name):
    runtime.set_limits(idle=50_000)
    body, block, text = WRONG[name]
    at = np.zeros(68, np.int32)
    x = memory(at[-(at.ctypes.data // 4) % 4 :][:64], "the array x")  # on 16 bytes
    with pytest.raises(runtime.SimtError) as error:
        run(body, [x], block=block)
    assert re.search(text, str(error.value), re.DOTALL)
