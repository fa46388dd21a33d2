"""A pytest plugin for runs under compute-sanitizer: `-p tests.support.no_memory_pool`.

CuPy's memory pool cuts arrays out of large blocks, where a kernel that runs past the end of its
array still hits memory of the pool and goes unnoticed. Without the pool every array is its own.
"""

import cupy

cupy.cuda.set_allocator(None)
cupy.cuda.set_pinned_memory_allocator(None)
