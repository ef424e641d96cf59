"""The ctypes side of `runtime/`: structures, loading, and launches, one at a time."""

import ctypes
import threading
from pathlib import Path

from ddtree_cupy.errors import EmulatorError

# One block's threads live in process-wide fibers, so launches take turns. Loading takes the lock too.
LAUNCH_LOCK = threading.RLock()


class Launch(ctypes.Structure):
    """`emu_launch` of emu_runtime.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("shared_alignment", ctypes.c_uint64),
        ("static_begin", ctypes.c_void_p),
        ("static_end", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("strict", ctypes.c_uint),
        ("flush_subnormals", ctypes.c_uint),
        ("cut_sums", ctypes.c_uint),
        ("error", ctypes.c_char_p),
        ("error_bytes", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
    )


class NativeParameter(ctypes.Structure):
    """`emu_parameter` of emu_kernel.h."""

    _fields_ = (
        ("is_pointer", ctypes.c_ubyte),
        ("is_const", ctypes.c_ubyte),
        ("kind", ctypes.c_ubyte),
        ("bytes", ctypes.c_uint),
    )


class NativeKernel(ctypes.Structure):
    """`emu_kernel` of emu_kernel.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("thunk", ctypes.c_void_p),
        ("num_parameters", ctypes.c_uint),
        ("parameters", ctypes.POINTER(NativeParameter)),
    )


class NativeModule:
    """A compiled module: its kernel table, and how to launch with the runtime it is bound to."""

    def __init__(self, library: Path) -> None:
        try:
            with LAUNCH_LOCK:
                self.library = ctypes.CDLL(str(library))
        except OSError as error:
            raise EmulatorError(
                f"ddtree_cupy.emulate: a compiled kernel cannot be loaded ({error}); set DDTREE_CACHE_DIR to another "
                "folder, on a file system that is not mounted noexec"
            ) from error
        # The runtime is found through the library: with several cache folders, the loader may have bound the library to
        # the runtime of another folder, and the kernels see only the threads of that runtime.
        self._run = self.library.emu_run
        self._run.argtypes = (ctypes.POINTER(Launch), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
        self._run.restype = ctypes.c_int
        count = ctypes.c_uint.in_dll(self.library, "emu_num_kernels").value
        table = (NativeKernel * count).in_dll(self.library, "emu_kernels")
        self.kernels = {kernel.name.decode(): kernel for kernel in table}
        section = (ctypes.c_void_p * 2).in_dll(self.library, "emu_shared_section")
        self._static = (section[0], section[1])
        self.static_bytes = (section[1] or 0) - (section[0] or 0)
        self._error = ctypes.create_string_buffer(4096)

    def launch(
        self,
        kernel: NativeKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem: int,
        arguments: "ctypes.Array[ctypes.c_void_p]",
        *,
        shared_alignment: int,
        seed: int,
        strict: bool,
        flush_subnormals: bool,
        cut_sums: bool,
    ) -> int:
        """Run the kernel to its end and return the number of thread switches; raise EmulatorError for a fault."""
        with LAUNCH_LOCK:
            launch = Launch(
                (ctypes.c_uint * 3)(*grid),
                (ctypes.c_uint * 3)(*block),
                shared_mem,
                shared_alignment,
                *self._static,
                seed,
                strict,
                flush_subnormals,
                cut_sums,
                ctypes.cast(self._error, ctypes.c_char_p),
                len(self._error),
                0,
            )
            if self._run(ctypes.byref(launch), kernel.thunk, arguments):
                name = kernel.name.decode()
                raise EmulatorError(f"{name}: {self._error.value.decode(errors='replace')}")
            return int(launch.switches)
