"""The ctypes side of `runtime/`: structures, loading, and launches, one at a time."""

import ctypes
import threading
from pathlib import Path

from ddtree_cupy.errors import EmulatorError

# One block's threads live in process-wide fibers, so launches take turns. Loading takes the lock too.
LAUNCH_LOCK = threading.RLock()


class Fault(ctypes.Structure):
    """`emu_fault` of emu_runtime.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("signal", ctypes.c_int),
        ("code", ctypes.c_int),
        ("is_write", ctypes.c_uint),
        ("is_stack", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("shared_offset", ctypes.c_int64),
        ("shared_bytes", ctypes.c_uint64),
        ("num_places", ctypes.c_uint),
        ("places", ctypes.c_uint64 * 16),
    )


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
        ("cluster", ctypes.c_uint),
        ("error", ctypes.c_char_p),
        ("error_bytes", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
        ("guard_shared", ctypes.c_uint),
        ("max_steps", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("fault", Fault),
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
        ("cluster", ctypes.c_uint),
    )


SIGNAL, STEPS, TIMEOUT, INTERRUPT = 1, 2, 3, 4  # kinds of a fault


class Stopped(Exception):
    """A launch that did not reach its end.

    Attributes
    ----------
    text : str
        Block, thread and what the runtime has seen.
    fault : Fault
        Its kind is 0 where `text` says all.
    library : path
        In which the places of the fault are.
    """

    def __init__(self, text: str, fault: Fault, library: Path) -> None:
        super().__init__(text)
        self.text, self.fault, self.library = text, fault, library


class NativeModule:
    """A compiled module: its kernel table, and how to launch with the runtime it is bound to."""

    def __init__(self, library: Path) -> None:
        self.path = library
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
        self.base = ctypes.c_void_p.in_dll(self.library, "emu_base").value or 0
        self._error = ctypes.create_string_buffer(4096)

    def launch(
        self,
        kernel: NativeKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem: int,
        arguments: "ctypes.Array[ctypes.c_void_p]",
        **settings: int,
    ) -> Launch:
        """Run the kernel to its end; raise `Stopped` for a fault. `settings` are further fields of `Launch`."""
        with LAUNCH_LOCK:
            launch = Launch(
                grid=(ctypes.c_uint * 3)(*grid),
                block=(ctypes.c_uint * 3)(*block),
                shared_bytes=shared_mem,
                cluster=kernel.cluster,
                static_begin=self._static[0],
                static_end=self._static[1],
                error=ctypes.cast(self._error, ctypes.c_char_p),
                error_bytes=len(self._error),
                **settings,
            )
            if self._run(ctypes.byref(launch), kernel.thunk, arguments) or launch.fault.kind == INTERRUPT:
                raise Stopped(self._error.value.decode(errors="replace"), launch.fault, self.path)
            return launch
