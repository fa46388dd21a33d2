"""The simulated GPU runs correct programs, in many orders, and names what is wrong in others."""

import numpy as np
import pytest

from tests.support.own_process import run_program
from tests.support.simt import compiler, runtime

reason = compiler.unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

SEEDS = range(24)
HEADER = """
typedef long long i64;
typedef unsigned int u32;
#define KERNEL extern "C" __global__ void
"""


@pytest.fixture(autouse=True)
def usual_limits():
    yield
    runtime.set_limits()
    runtime.set_stale_loads(0)
    runtime.count_loads(False)
    runtime.set_seed(0)


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


def failure(body, arguments, **launch):
    with pytest.raises(runtime.SimtError) as error:
        run(body, arguments, **launch)
    return str(error.value)


# ----------------------------------------------------------------------------- what must work


@pytest.mark.parametrize("grid, block", [(1, 1), (1, 33), (3, 64), (7, 256), (5, 1024)])
def test_every_thread_of_every_block_runs_once(memory, grid, block):
    count, n = memory(np.zeros(grid * block, np.int32)), grid * block
    run("KERNEL k(int* p) { atomicAdd(p + blockIdx.x * blockDim.x + threadIdx.x, 1); }",
        [count], grid, block)  # fmt: skip
    np.testing.assert_array_equal(count, np.ones(n))


def test_arguments_of_every_kind_arrive(memory):
    out = memory(np.zeros(3, np.float32))
    body = (
        "struct Two { i64 x[2]; };"
        "KERNEL k(float* out, i64 a, float b, const __grid_constant__ Two c) {"
        "  out[0] = (float)a; out[1] = b; out[2] = (float)c.x[threadIdx.x + 1]; }"
    )
    kernel = program(body).kernel("k")
    assert kernel.signature == "P#.S"
    values = [np.uint64(out.ctypes.data), np.int64(-3), np.float32(0.25), np.array([5, 7])]
    kernel.run(1, 1, [value.tobytes() for value in values])
    assert out.tolist() == [-3.0, 0.25, 7.0]


def test_a_kernel_that_there_is_not():
    with pytest.raises(KeyError, match="other"):
        program("KERNEL k(int* p) {}").kernel("other")


@pytest.mark.parametrize("width", [1, 4, 8, 32])
@pytest.mark.parametrize("seed", range(6))
def test_votes_and_shuffles(memory, width, seed):
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
    x = memory(np.random.default_rng(seed).integers(-9, 9, 96).astype(np.int32))
    votes, first, sums = (memory(np.zeros(96, t)) for t in (np.uint32, np.int32, np.int32))
    run(body, [x, votes, first, sums, width], 1, 96, seed)
    for begin in range(0, 96, width):
        part = slice(begin, begin + width)
        bits = sum(1 << (begin % 32 + i) for i in range(width) if x[begin + i] > 0)
        assert set(votes[part].tolist()) == {bits}
        assert set(first[part].tolist()) == {x[begin]}
        assert set(sums[part].tolist()) == {x[part].sum()}


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_lose_nothing(memory, seed):
    body = """
    KERNEL k(int* p, unsigned long long* q) {
      int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
      atomicAdd(p, i); atomicMin(p + 1, i); atomicMax(p + 2, i); atomicAdd(q, 1ull << 33);
      for (;;) {  // adds by exchange
        unsigned long long seen = *(volatile unsigned long long*)(q + 1);
        if (atomicCAS(q + 1, seen, seen + 2) == seen) break;
      }
    }"""
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


@pytest.mark.parametrize("stale", [0, 1])  # atomics are never stale
@pytest.mark.parametrize("seed", SEEDS)
def test_a_lock_that_every_lane_takes(memory, seed, stale):
    runtime.set_stale_loads(stale)
    lock, counter = memory(np.zeros(1, np.int32)), memory(np.zeros(1, np.int32))
    run(LOCK, [lock, counter], 2, 64, seed)
    assert counter[0] == 128


@pytest.mark.parametrize("gone, instead", [("atomicCAS(lock, 0, 1) == 0", "true"),
                                           ("__threadfence();", "")])  # fmt: skip
def test_without_the_lock_or_the_fence_an_increment_is_lost(memory, gone, instead):
    body = LOCK.replace(gone, instead)
    ends = set()
    for seed in SEEDS:
        lock, counter = memory(np.zeros(1, np.int32)), memory(np.zeros(1, np.int32))
        run(body, [lock, counter], 2, 64, seed)
        ends.add(int(counter[0]))
    assert min(ends) < 128


RELEASE = 'asm volatile("st.release.gpu.s64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");'
WITHOUT_ORDER = "*(volatile i64*)flag = value;"


@pytest.mark.parametrize("store, is_right", [(RELEASE, True), (WITHOUT_ORDER, False)])
def test_a_message_needs_a_release(memory, store, is_right):
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
    seen = set()
    for seed in range(200):
        flag, data = memory(np.zeros(1, np.int64)), memory(np.zeros(2, np.int32))
        results = memory(np.zeros(64, np.int32))
        run(body, [flag, data, results], 2, 32, seed)
        seen.update(results.tolist())
        assert data.tolist() == [7, 8]
    assert seen == ({-1, 7} if is_right else {-1, 0, 7})


READ_PLAINLY = "value = *(volatile i64*)flag;"
ACQUIRE = 'asm volatile("ld.acquire.gpu.s64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");'


@pytest.mark.parametrize(
    "load, is_right",
    [
        (ACQUIRE, True),
        (READ_PLAINLY + "if (value) __threadfence();", True),
        (READ_PLAINLY, False),
        ("value = *flag;", False),
    ],
    ids=["acquire", "fence", "volatile", "plain"],
)
def test_a_message_needs_an_acquire(memory, load, is_right):
    """Of a flag that was read anew it does not follow that what it tells of is read anew."""
    runtime.set_stale_loads(1)
    body = """
    KERNEL k(i64* flag, int* data, int* seen) {
      i64 value = 1;
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        data[0] = 7;
        RELEASE
      }
      for (int i = 0; i < 4; ++i) {
        LOAD
        if (value) break;
      }
      seen[blockIdx.x * blockDim.x + threadIdx.x] = value ? data[0] : -1;
    }""".replace("RELEASE", RELEASE).replace("LOAD", load)
    seen = set()
    for seed in range(60):
        flag, data = memory(np.zeros(1, np.int64)), memory(np.zeros(1, np.int32))
        results = memory(np.zeros(64, np.int32))
        run(body, [flag, data, results], 2, 32, seed)
        seen.update(results.tolist())
        assert data.tolist() == [7]
    assert seen == ({-1, 7} if is_right else {-1, 0, 7})


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


def test_stale_loads_are_a_choice(memory):
    runtime.set_limits(launch=100_000)
    for one_in, fails in ((0, False), (2, True)):
        runtime.set_stale_loads(one_in)
        failures = 0
        for seed in range(24):
            flag, data, seen = (memory(np.zeros(n, np.int32)) for n in (1, 1, 64))
            try:
                run(SPIN.replace("LOAD", "*flag"), [flag, data, seen], 2, 32, seed)
            except runtime.SimtError:
                failures += 1
        assert (failures > 0) == fails and failures < 24


def test_lanes_that_meet_see_what_the_others_have_stored(memory):
    runtime.set_stale_loads(1)
    body = """
    KERNEL k(int* x, int* y) {
      for (int i = 0; i < 3; ++i) {
        x[threadIdx.x] = (int)threadIdx.x + i;
        __syncwarp();
        y[threadIdx.x] += x[threadIdx.x ^ 1u];
        MEET
      }
    }"""
    wrong = {"__syncwarp();": 0, "": 0}
    for meet in wrong:
        for seed in SEEDS:
            x, y = memory(np.full(64, -9, np.int32)), memory(np.zeros(64, np.int32))
            run(body.replace("MEET", meet), [x, y], 1, 64, seed)
            wrong[meet] += not (y == 3 * (np.arange(64) ^ 1) + 3).all()
    assert wrong["__syncwarp();"] == 0 and wrong[""] > 0


def test_no_lane_loads_what_it_has_overwritten(memory):
    """Neither where it has stored nor, by mistake, in the half of a word beside it."""
    runtime.set_stale_loads(1)
    body = """
    KERNEL k(int* x, int* bad) {
      int* mine = x + blockIdx.x * blockDim.x + threadIdx.x;
      for (int i = 0; i < 30; ++i) {
        *mine = i;
        if (i % 3) atomicAdd(bad + 1, 1);  // others run
        if (*mine != i) atomicAdd(bad, 1);
      }
    }"""
    for seed in SEEDS:
        x, bad = memory(np.zeros(256, np.int32)), memory(np.zeros(2, np.int32))
        run(body, [x, bad], 4, 64, seed)
        assert bad[0] == 0 and (x == 29).all()


def test_what_a_lane_waits_for_is_seen_in_the_end(memory):
    """The lane that has stored it waits in a vote for those that wait for it."""
    body = """
    KERNEL k(int* flag, u32* votes) {
      if (threadIdx.x == 0) *(volatile int*)flag = 1;
      else while (*(volatile int*)flag == 0) {}
      votes[threadIdx.x] = __ballot_sync(~0u, 1);
    }"""
    for seed in SEEDS:
        flag, votes = memory(np.zeros(1, np.int32)), memory(np.zeros(32, np.uint32))
        run(body, [flag, votes], 1, 32, seed)
        assert set(votes.tolist()) == {2**32 - 1}


def test_a_lane_sees_its_own_stores_in_order(memory):
    body = """
    KERNEL k(int* x, int* bad) {
      int* mine = x + 4 * (blockIdx.x * blockDim.x + threadIdx.x);
      for (int i = 0; i < 30; ++i) {
        *(volatile int*)(mine + i % 4) = i;
        atomicAdd(x + 1024, 1);  // others run
        if (*(volatile int*)(mine + i % 4) != i) atomicAdd(bad, 1);
        if (i >= 4 && *(volatile int*)(mine + (i + 1) % 4) != i - 3) atomicAdd(bad, 1);
        if (i % 8 == 7) atomicAdd(mine + 3, 0);
      }
    }"""
    for seed in SEEDS:
        x, bad = memory(np.zeros(1025, np.int32)), memory(np.zeros(1, np.int32))
        run(body, [x, bad], 4, 64, seed)
        assert bad[0] == 0
        assert x[:4].tolist() == [28, 29, 26, 27]
        np.testing.assert_array_equal(x[:1024].reshape(-1, 4), np.tile(x[:4], (256, 1)))


def test_sixteen_bit_floats_round_as_numpy_does(memory):
    body = """
    KERNEL k(const float* x, unsigned short* half, float* back, i64 n) {
      for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        unsigned short h; float y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x[i]));
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(h));
        half[i] = h; back[i] = y;
      }
    }""".replace('"f"(x[i])', '"f"(xi)').replace("float y;", "float y, xi = x[i];")
    rng = np.random.default_rng(0)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    many = np.exp(rng.normal(0, 12, 20_000)).astype(np.float32) * rng.choice([-1, 1], 20_000)
    ties = np.nextafter(halves[:999], np.float32(9)) / 2 + halves[:999] / 2
    x = memory(np.concatenate([halves, many, ties, [np.inf, 65519, 65520]]).astype(np.float32))
    half, back = memory(np.zeros(len(x), np.uint16)), memory(np.zeros(len(x), np.float32))
    run(body, [x, half, back, len(x)])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(half, expected.view(np.uint16))
    np.testing.assert_array_equal(back, expected.astype(np.float32))


def order_of(memory, seed):
    ticket, order = memory(np.zeros(1, np.int32)), memory(np.zeros(256, np.int32))
    run("KERNEL k(int* t, int* o) {"
        "  o[atomicAdd(t, 1)] = (int)(blockIdx.x * blockDim.x + threadIdx.x); }",
        [ticket, order], 2, 128, seed)  # fmt: skip
    return order.tolist()


def test_a_seed_is_an_order(memory):
    orders = {seed: order_of(memory, seed) for seed in SEEDS}
    assert all(sorted(order) == list(range(256)) for order in orders.values())
    assert all(order_of(memory, seed) == order for seed, order in orders.items())
    assert len({tuple(order) for order in orders.values()}) > 12


# ----------------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("busy", [0, 1, 3, 8])
def test_warps_that_touch_no_memory_are_idle(memory, busy):
    runtime.count_loads(True)
    y = memory(np.zeros(9, np.int32))
    body = """
    KERNEL k(int* y, i64 busy) {
      i64 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
      u32 votes = __ballot_sync(~0u, warp < busy);
      if (votes && threadIdx.x % 32 == 7) y[warp] = 1;
    }"""
    facts = run(body, [y, busy], 4, 64, seed=busy)
    assert (facts.warps, facts.busy_warps) == (8, busy)
    assert y.sum() == busy
    assert run("KERNEL k(int* y) { y[8] = 1; }", [y], 3, 33)[:2] == (6, 6)


CHAINS = {
    "nothing": ("", 0),
    "a load": ("y[0] = x[0];", 1),
    "two operands": ("y[0] = x[0] + x[9];", 1),
    "copied one by one": ("for (int i = 0; i < 4; ++i) y[i] = x[i];", 4),
    "copied by four": (
        "i64 a = x[0], b = x[1], c = x[2], d = x[3]; y[0] = a; y[1] = b; y[2] = c; y[3] = d;",
        1,
    ),
    "a sum": ("i64 sum = 0; for (int i = 0; i < 8; ++i) sum += x[i]; y[0] = sum;", 1),
    "a vote in between": ("if (__ballot_sync(1u, x[0] == 0)) y[0] = x[1];", 2),
    "volatile": ("y[0] = *(volatile i64*)x + *(volatile i64*)(x + 1);", 2),
    "acquired": (
        'i64 v; asm volatile("ld.acquire.gpu.s64 %0, [%1];" : "=l"(v) : "l"(x) : "memory");'
        "y[0] = v + x[1];",
        2,
    ),
    "atomics": ("atomicAdd((int*)x, 1); atomicAdd((int*)y, 1);", 2),
    "a list": ("i64* at = x; for (int i = 0; i < 5; ++i) at = (i64*)*at; y[0] = (i64)at;", 5),
}


@pytest.mark.parametrize("name", CHAINS)
def test_loads_that_wait_for_each_other_are_a_chain(memory, name):
    runtime.count_loads(True)
    body, chain = CHAINS[name]
    y, x = memory(np.zeros(16, np.int64)), memory(np.zeros(16, np.int64))
    if name == "a list":
        x[:] = x.ctypes.data + 8 * np.array([3, 0, 0, 9, 0, 0, 0, 1, 0, 7, *range(6)])
    body = f"KERNEL k(i64* x, i64* y) {{ {body} }}"
    assert run(body, [x, y], block=1, seed=len(name)).longest_chain == chain
    other = body.replace("{", "{ if (threadIdx.x != 3) return;", 1).replace("(1u,", "(8u,")
    assert run(other, [x, y], block=8).longest_chain == chain  # of one lane, whichever


# ------------------------------------------------------------------------- what must be found


def test_reading_a_neighbour_without_meeting_it_is_wrong_in_some_order(memory):
    body = """
    KERNEL k(int* x, int* y) {
      *(volatile int*)(x + threadIdx.x) = (int)threadIdx.x;
      MEET
      y[threadIdx.x] = *(volatile int*)(x + (threadIdx.x ^ 1u));
    }"""
    wrong = {"": 0, "__syncwarp();": 0}
    for meet in wrong:
        for seed in SEEDS:
            x, y = memory(np.full(64, -1, np.int32)), memory(np.zeros(64, np.int32))
            run(body.replace("MEET", meet), [x, y], 1, 64, seed)
            wrong[meet] += y.tolist() != [i ^ 1 for i in range(64)]
    assert wrong[""] > 0
    assert wrong["__syncwarp();"] == 0


def test_a_mask_without_the_own_lane(memory):
    x = memory(np.zeros(32, np.uint32))
    text = failure("KERNEL k(u32* x) { x[threadIdx.x] = __ballot_sync(0xFu, 1); }", [x], block=32)
    assert "__ballot_sync(mask 0x0000000f)" in text
    assert "does not name its own lane" in text
    assert "at k (kernel.cu:5)" in text


def test_lanes_that_name_each_other_in_two_calls(memory):
    x = memory(np.zeros(32, np.uint32))
    body = """
    KERNEL k(u32* x) {
      u32 votes;
      if (threadIdx.x % 2)
        votes = __ballot_sync(~0u, 1);
      else
        votes = __ballot_sync(~0u, 0);
      x[threadIdx.x] = votes;
    }"""
    assert "which is in another call: __ballot_sync" in failure(body, [x], block=32)


def test_masks_that_differ(memory):
    x = memory(np.zeros(32, np.uint32))
    body = "KERNEL k(u32* x) { x[threadIdx.x] = __ballot_sync(threadIdx.x ? ~0u : 3u, 1); }"
    assert "in another call" in failure(body, [x], block=32)


@pytest.mark.parametrize("seed", range(8))
def test_a_lane_that_has_left(memory, seed):
    x = memory(np.zeros(32, np.uint32))
    body = """
    KERNEL k(u32* x) {
      if (threadIdx.x == 5) return;
      x[threadIdx.x] = __ballot_sync(~0u, 1);
    }"""
    assert "names lane 5, which has left the kernel" in failure(body, [x], block=32, seed=seed)


def test_a_lane_that_the_block_does_not_have(memory):
    x = memory(np.zeros(32, np.uint32))
    body = "KERNEL k(u32* x) { x[threadIdx.x] = __ballot_sync(~0u, 1); }"
    assert "which the block does not have" in failure(body, [x], block=20)


def test_a_shuffle_from_a_lane_that_is_not_named(memory):
    x = memory(np.zeros(32, np.uint32))
    body = "KERNEL k(u32* x) { if (threadIdx.x > 3) x[threadIdx.x] = __shfl_sync(~15u, 1u, 0); }"
    assert "reads from lane 0, which the mask does not name" in failure(body, [x], block=32)


@pytest.mark.parametrize("seed", range(8))
def test_a_lock_that_is_held_in_a_vote(memory, seed):
    """The lane that has the lock waits for the lanes that wait for the lock."""
    runtime.set_limits(idle=100_000)
    body = """
    KERNEL k(int* lock, u32* x) {
      while (atomicCAS(lock, 0, 1) != 0) {}
      x[threadIdx.x] = __ballot_sync(~0u, 1);
      atomicCAS(lock, 1, 0);
    }"""
    lock, x = memory(np.zeros(1, np.int32)), memory(np.zeros(32, np.uint32))
    text = failure(body, [lock, x], block=32, seed=seed)
    assert "no progress: nothing has changed" in text
    assert "wait in __ballot_sync(mask 0xffffffff)" in text
    assert "run, last at" in text and "kernel.cu:7" in text


def test_lanes_that_wait_for_each_other_in_a_ring(memory):
    body = """
    KERNEL k(u32* x) {
      u32 lane = threadIdx.x;  // 0 waits for 1, which waits for 2, which waits for 0
      if (lane < 3) x[lane] = __ballot_sync(1u << lane | 1u << (lane + 1) % 3, 1);
    }"""
    text = failure(body, [memory(np.zeros(32, np.uint32))], block=32)
    assert "no progress: every lane waits" in text
    assert "lanes 0 wait in __ballot_sync(mask 0x00000003)" in text


def test_a_flag_that_nobody_sets(memory):
    runtime.set_limits(idle=50_000)
    body = "KERNEL k(int* flag) { while (*(volatile int*)flag == 0) {} }"
    text = failure(body, [memory(np.zeros(1, np.int32))])
    assert "no progress: nothing has changed" in text
    assert "lanes 0-31 run, last at" in text or "have not begun" in text


def test_lanes_that_take_turns_for_ever(memory):
    runtime.set_limits(launch=300_000)
    body = "KERNEL k(int* x) { while (atomicAdd(x, 1) >= 0) atomicAdd(x, -1); }"
    text = failure(body, [memory(np.zeros(1, np.int32))])
    assert "no progress: lanes run for" in text


def test_a_loop_of_ordinary_accesses_that_never_ends(memory):
    runtime.set_limits(launch=3_000_000)
    body = "KERNEL k(int* x) { for (i64 i = 0; x[i & 15] >= 0; ++i) x[i & 15] ^= 1; }"
    assert "no progress" in failure(body, [memory(np.zeros(16, np.int32))])


@pytest.mark.parametrize("access, what", [("x[32] = 1;", "write"), ("x[0] = x[40];", "read")])
def test_an_access_behind_the_end(memory, access, what):
    x = memory(np.zeros(32, np.int32), "the array x")
    text = failure(f"KERNEL k(int* x) {{ {access} }}", [x], block=1)
    assert f"{what} of 4 bytes" in text
    assert "behind the end of the array x" in text
    assert "k (kernel.cu:5)" in text and "seed" in text


def far_from_all():
    """Memory that lies close behind no other: what does is told as behind the end of that."""
    return np.zeros(1 << 16, np.int32)[1 << 15 :][:32]


def test_memory_that_the_device_does_not_have():
    host = far_from_all()
    text = failure("KERNEL k(int* x) { x[threadIdx.x] = 1; }", [host], block=32)
    assert "which is no memory of the device" in text
    assert not host.any()


def test_memory_that_was_given_back(memory):
    body, x = "KERNEL k(int* x) { x[threadIdx.x] = 1; }", far_from_all()
    runtime.add_memory(x.ctypes.data, x.nbytes, "x")
    run(body, [x], block=32)
    runtime.remove_memory(x.ctypes.data)
    assert "no memory of the device" in failure(body, [x], block=32)


def test_an_address_that_does_not_suit_the_type(memory):
    x = memory(np.zeros(33, np.int32))
    at = x.ctypes.data + (x.ctypes.data % 8 == 0) * 4
    body = "KERNEL k(i64* x) { *x = 1; }"
    assert "misaligned access of 8 bytes" in failure(body, [at], block=1)
    wide = "struct alignas(16) W { i64 a, b; }; KERNEL k(W* x, i64 i) { x[2] = x[i]; }"
    assert "misaligned access of 16 bytes" in failure(wide, [at, 1], block=1)


def test_the_next_launch_is_as_if_nothing_had_been_wrong(memory):
    x = memory(np.zeros(64, np.int32))
    for seed in range(4):
        failure("KERNEL k(int* x) { if (threadIdx.x % 3) x[1000] = 1; else __syncwarp(); }", [x],
                seed=seed)  # fmt: skip
        run("KERNEL k(int* x) { x[threadIdx.x] = (int)threadIdx.x; }", [x], seed=seed)
        np.testing.assert_array_equal(x, np.arange(64))


@pytest.mark.parametrize(
    "body, options, text",
    [
        ("KERNEL k(int* x) { oops; }", (), "oops"),
        ("KERNEL k(double x) {}", (), "SimtCode<double>"),
        ("KERNEL k(int* x) { __activemask(); }", (), "__activemask"),
        ('KERNEL k(int* x) { asm("mov %0, 1;" : "=r"(*x)); }', (), "asm"),
        ('KERNEL k(i64* x) { i64 y; asm("ld.weird %0, [%1];" : "=l"(y) : "l"(x)); }', (), "weird"),
        ("KERNEL k(int* x) {}", ("-ftz=true",), "ftz"),
    ],
)
def test_what_does_not_compile(body, options, text):
    with pytest.raises(compiler.CompileError, match=text):
        compiler.compile_source(HEADER + body, options)


def test_a_compiler_that_checks_longjmp_by_itself(tmp_path):
    """As Ubuntu's does: to it a jump to another stack is an attack."""
    tool = tmp_path / "g++"
    tool.write_text('#!/bin/sh\nexec g++ -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2 "$@"\n')
    tool.chmod(0o755)
    code = (
        "from tests.support.simt import compiler, runtime\n"
        "source = 'extern \"C\" __global__ void k() { __syncwarp(); }'\n"
        "runtime.Program(compiler.compile_source(source)).kernel('k').run(3, 64, [])\n"
    )
    run_program(code, CXX=str(tool), SOK_LITE_CACHE=str(tmp_path))
