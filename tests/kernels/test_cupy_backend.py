"""The CuPy backend's own logic, against a stand-in for CuPy: options, shared-memory opt-in, devices, errors."""

import sys
import types

import numpy as np
import pytest

from ddtree_cupy.errors import ArgumentError, CompileError, DTypeError, LayoutError, MissingGPUError, UnsupportedError
from ddtree_cupy.kernels import KernelSpec, cupy_backend
from ddtree_cupy.kernels.launch import Kernel

CODE = "template <class T> __global__ void k(const T* x, int n, float a) {}\n"


class FakeArray(np.ndarray):
    device = types.SimpleNamespace(id=0)


class CompileException(Exception):
    pass


class FakeKernel:
    shared_size_bytes = 1024
    attributes = types.MappingProxyType({"num_regs": 32})

    def __init__(self):
        self.grants, self.launches = [], []

    def __setattr__(self, name, value):
        if name == "max_dynamic_shared_size_bytes":
            self.grants.append(value)
        super().__setattr__(name, value)

    @property
    def kernel(self):
        return self

    def __call__(self, grid, block, args, shared_mem=0):
        self.launches.append((grid, block, args, shared_mem))


@pytest.fixture
def cupy(monkeypatch):
    """A module named cupy with the few names the backend uses; `made` records RawModule calls."""
    fake = types.ModuleType("cupy")
    fake.ndarray, fake.made, fake.fail = FakeArray, [], None
    fake.version, fake.capability = (13, 0), "90"

    class RawModule:
        def __init__(self, **options):
            fake.made.append(options)

        def get_function(self, name):
            if fake.fail:
                raise CompileException(fake.fail)
            return FakeKernel()

    def device(number):
        attributes = {"MaxSharedMemoryPerBlockOptin": 232_448}
        return types.SimpleNamespace(compute_capability=fake.capability, attributes=attributes)

    fake.RawModule = RawModule
    fake.cuda = types.ModuleType("cupy.cuda")
    fake.cuda.Device = device
    fake.cuda.nvrtc = types.SimpleNamespace(getVersion=lambda: fake.version)
    fake.cuda.compiler = types.SimpleNamespace(CompileException=CompileException)
    fake.cuda.runtime = types.SimpleNamespace(getDevice=lambda: 0, CUDARuntimeError=OSError)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake.cuda)
    return fake


def make(**changes):
    fields = {"source": "op/k.cu", "code": CODE, "entry": "k<float>", "nullable": "x"}
    spec = KernelSpec(**(fields | changes))
    return Kernel(spec, cupy_backend.compile_kernel(spec, cupy_backend.device_key()))


def array(n=4):
    return np.zeros(n, np.float32).view(FakeArray)


def test_module_is_one_text_with_one_expression(cupy):
    make(defines=("D=64",))
    (options,) = cupy.made
    assert options["code"] == f'#line 1 "op/k.cu"\n{CODE}'
    assert options["options"] == ("--std=c++17", "-DD=64")
    assert options["name_expressions"] == ("k<float>",)
    make(entry="k")
    assert cupy.made[1]["name_expressions"] is None


def test_scalars_are_exact_and_arrays_pass_through(cupy):
    kernel, x = make(), array()
    kernel((2, 1), (64,), x=x, n=3, a=1.5, shared_mem=16)
    ((grid, block, args, shared),) = kernel.compiled._kernel.launches
    assert (grid, block, shared) == ((2, 1), (64,), 16)
    assert args[0] is x
    assert [type(value) for value in args[1:]] == [np.int32, np.float32]
    kernel((1,), (64,), x=None, n=3, a=1.5)
    kernel((0,), (64,), x=x, n=3, a=1.5)
    assert len(kernel.compiled._kernel.launches) == 2


def test_shared_memory_is_opted_into_once(cupy):
    kernel = make()
    native = kernel.compiled._kernel
    kernel((1,), (64,), x=None, n=3, a=1.5, shared_mem=47 * 1024)
    assert native.grants == []
    kernel((1,), (64,), x=None, n=3, a=1.5, shared_mem=47 * 1024 + 1)  # with 1 KiB of static memory this passes 48 KiB
    kernel((1,), (64,), x=None, n=3, a=1.5, shared_mem=100 * 1024)
    assert native.grants == [232_448 - 1024]
    with pytest.raises(ArgumentError, match="at most 231424 on this device"):
        kernel((1,), (64,), x=None, n=3, a=1.5, shared_mem=232_448)
    early = make(max_shared_bytes=64 * 1024).compiled._kernel
    assert early.grants == [232_448 - 1024]


def test_arrays_of_another_kind_or_device_are_refused(cupy):
    kernel, x = make(), array()
    with pytest.raises(DTypeError, match=r"`x` is a numpy\.ndarray"):
        kernel((1,), (64,), x=np.zeros(4, np.float32), n=3, a=1.5)
    x.device = types.SimpleNamespace(id=1)
    with pytest.raises(LayoutError, match="`x` is on device 1, the current device is 0"):
        kernel((1,), (64,), x=x, n=3, a=1.5)
    kernel.launch((1,), (64,), {"x": x, "n": 3, "a": 1.5})  # the caller has checked


def test_arch_specific_kernels_need_the_device_and_nvrtc(cupy):
    make(arch_specific="sm_90a")
    assert cupy.made[0]["options"] == ("--std=c++17", "-arch=sm_90a")
    cupy.version = (12, 8)
    with pytest.raises(UnsupportedError, match=r"needs NVRTC 12\.9 or later for sm_90a, CuPy uses 12\.8"):
        make(arch_specific="sm_90a")
    cupy.capability = "120"
    with pytest.raises(UnsupportedError, match="runs on sm_90a only, this device is sm_120"):
        make(arch_specific="sm_90a")


def test_compile_errors_carry_kernel_arch_and_version(cupy):
    cupy.fail = "op/k.cu(3): error: oops"
    with pytest.raises(
        CompileError, match=r"(?s)op/k\.cu: k<float> for sm_90 by NVRTC 13\.0 .*op/k\.cu\(3\): error: oops"
    ):
        make()


def test_missing_driver_is_explained(cupy):
    def broken():
        raise OSError("cudaErrorInsufficientDriver")

    cupy.cuda.runtime.getDevice = broken
    with pytest.raises(MissingGPUError, match=r"no usable GPU \(cudaErrorInsufficientDriver\)"):
        make()
