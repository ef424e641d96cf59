"""What ended a launch, in words: signals, limits, and the place in the kernel's source."""

import contextlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddtree_cupy._overlap import Place
from ddtree_cupy.emulate import _native
from ddtree_cupy.emulate._native import Fault, Stopped
from ddtree_cupy.emulate._symbols import places
from ddtree_cupy.errors import EmulatorError

NEAR_BYTES = 1 << 20  # an address so close to an array is taken for a wrong index into it
SI_KERNEL = 128  # of an address that is refused before it is looked up, so that nobody tells it
NO_SHARED = 0x8000  # kNoShared of emu_runtime.h; addresses below it are taken for null pointers
NULL_BYTES = 1 << 16


def error_of(kernel: str, stopped: Stopped, args: Sequence[Any], limits: Mapping[str, int]) -> BaseException:
    """Return the exception to raise for a launch that was stopped.

    Parameters
    ----------
    kernel : str
    stopped : Stopped
    args : sequence
        What the kernel was given: arrays are named by their place in it.
    limits : mapping
        Of the launch: `max_steps`, `timeout_ns`.
    """
    fault = stopped.fault
    if fault.kind == 0:
        return EmulatorError(f"{kernel}: {stopped.text}")
    known = stopped.text.partition(": out of ")[0].partition(": interrupted")[0]  # of a launch stopped at a barrier
    if fault.num_places:
        known = f"{stopped.text}{_place(stopped)}"
    if fault.kind == _native.INTERRUPT:
        return KeyboardInterrupt(f"{kernel}: {known}: interrupted" if known else f"{kernel}: interrupted")
    if fault.kind == _native.SIGNAL:
        return EmulatorError(f"{kernel}: {known}: {_words(fault, args)}")
    reached = f"timeout={limits['timeout_ns'] / 1e9:g} s"
    if fault.kind == _native.STEPS:
        reached = f"max_steps={limits['max_steps']}"
    return EmulatorError(f"{kernel}: {known}: the launch reached {reached} here; is this loop endless?")


def raise_for(error: BaseException) -> None:
    """Raise; for an interrupt after what the program does at Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    raise error


def _place(stopped: Stopped) -> str:
    found = places(stopped.library, stopped.fault.places[: stopped.fault.num_places])
    return found[0] if found else "an unknown line (addr2line of binutils names it)"


def _words(fault: Fault, args: Sequence[Any]) -> str:
    if fault.signal == signal.SIGFPE:
        return "integer division by zero, or of the smallest integer by -1"
    if fault.signal == signal.SIGILL:
        return "a trap: code that the compiler takes for unreachable was reached"
    if fault.signal == signal.SIGABRT:
        return "abort() was called"
    if fault.is_stack:
        return "the stack of this thread is full: 256 KiB"
    if fault.code == SI_KERNEL:
        return "accesses an address that no memory can have"
    verb = "writes" if fault.is_write else "reads"
    if fault.shared_bytes:
        return f"{verb} byte {fault.shared_offset} of dynamic shared memory, which has {fault.shared_bytes} bytes"
    if NO_SHARED <= fault.address < NULL_BYTES:
        return f"{verb} dynamic shared memory, of which the launch has none; pass shared_mem=, its size in bytes"
    if fault.address < NO_SHARED:
        return f"{verb} through a null pointer" + (f", {fault.address} bytes behind it" if fault.address else "")
    return f"{verb} {_nearest(fault.address, args) or f'address {fault.address:#x}, where no argument lies'}"


def _nearest(address: int, args: Sequence[Any]) -> str:
    """Return which element of which array an address outside of all of them would be; "" far from all."""
    best, words = NEAR_BYTES, ""
    for index, array in enumerate(args):
        if not isinstance(array, np.ndarray) or not array.size:
            continue
        low, high = Place.of(array).bounds
        distance = low - address if address < low else address - high + 1
        if not 0 < distance < best:
            continue
        best, kind = distance, f"{array.dtype.name}, shape {array.shape}"
        if array.flags.c_contiguous:
            element = (address - low) // array.itemsize
            words = f"element {element} of argument {index}, which has {array.size} ({kind})"
        else:
            side = "in front of" if address < low else "behind"
            words = f"{distance} bytes {side} argument {index} ({kind})"
    return words
