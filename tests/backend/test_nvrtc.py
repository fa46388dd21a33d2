"""What NVRTC is asked for; it compiles without a GPU."""

import pytest

from sok_lite.backend.nvrtc import FLAGS, CompileError
from tests.support.helpers import need_nvrtc

SOURCE = 'extern "C" __global__ void k(float* p) { p[0] = p[0] * p[1] + p[2]; }'


@pytest.fixture
def nvrtc():
    return need_nvrtc()


def test_a_gpu_that_is_known_gets_machine_code(nvrtc):
    assert nvrtc.architecture("80") == "-arch=sm_80"
    made = nvrtc.compiled(SOURCE, [nvrtc.architecture("90")])
    assert made.binary.startswith(b"\x7fELF")
    assert ".target sm_90" in made.ptx and ".entry k(" in made.ptx


def test_a_newer_gpu_than_nvrtc_knows_gets_what_its_driver_can_compile(nvrtc):
    import cupy

    newest = max(cupy.cuda.nvrtc.getSupportedArchs())
    flag = nvrtc.architecture(str(newest + 100))
    assert flag == f"-arch=compute_{newest}"
    made = nvrtc.compiled(SOURCE, [flag])
    assert made.binary == made.ptx.encode()


def test_a_gpu_that_is_too_old_is_refused(nvrtc):
    with pytest.raises(RuntimeError, match=r"and newer\. Received: 2\.0\. Use an older CuPy"):
        nvrtc.architecture("20")


def test_products_are_not_fused_and_small_numbers_are_kept(nvrtc):
    ptx = nvrtc.compiled(SOURCE, [*FLAGS, "-arch=sm_90"]).ptx
    assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx and "ftz" not in ptx
    assert "fma.rn.f32" in nvrtc.compiled(SOURCE, ["-arch=sm_90"]).ptx
    # What cupy.RawModule appends wins over what is asked for.
    assert "ftz" in nvrtc.compiled(SOURCE, ["-ftz=false", "-arch=sm_90", "-ftz=true"]).ptx


def test_what_does_not_compile_is_told_in_the_compilers_words(nvrtc):
    with pytest.raises(CompileError, match=r"refused a kernel(.|\n)*nonsense"):
        nvrtc.compiled("__device__ int f() { return nonsense; }", ["-arch=sm_90"])


def test_a_build_is_told_from_another_of_the_same_version(nvrtc):
    version, *comment = nvrtc.build.splitlines()
    assert version == nvrtc.version
    assert any(f"release {version}, V{version}." in line for line in comment)
