"""What a compiled library tells of itself, through objdump and addr2line: variables, shared memory, lines."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

FOLDER = "/kernel"  # stands for the working folder of the compiler, whatever that is, in debugging information
_HEADERS = "emulate/runtime/"


def tool_output(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a compiler or a tool of it, in the C locale."""
    # A preloaded sanitizer would run, and complain, inside the compiler.
    clean = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    clean["LC_ALL"] = "C"
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="surrogateescape", env=clean, check=False
    )


def static_shared_bytes(library: Path) -> dict[str, dict[str, int]]:
    """Return the bytes of every static `__shared__` object by function and name; nothing where objdump is missing."""
    if shutil.which("objdump") is None:
        return {}
    found: dict[str, dict[str, int]] = {}
    table = tool_output(["objdump", "--syms", "--demangle", str(library)]).stdout
    for size, symbol in re.findall(r" O emu_shared\t([0-9a-f]+)\s+(.*)$", table, re.MULTILINE):
        owner, _, name = symbol.replace("(anonymous namespace)::", "").replace("[abi:emu_shared]", "").rpartition("::")
        found.setdefault(owner, {})[name] = int(size, 16)
    return found


def variables(library: Path) -> dict[str, tuple[int, int]]:
    """Return offset and bytes of every variable of the kernel's own text by its name; nothing without `objdump`."""
    if shutil.which("objdump") is None:
        return {}
    table = tool_output(["objdump", "--syms", "--demangle", str(library)]).stdout
    found = re.findall(r"^([0-9a-f]+) [lgu! ].{5}O \.(?:data|bss|rodata)\S*\t([0-9a-f]+)\s+(.*)$", table, re.MULTILINE)
    return {
        symbol.replace("(anonymous namespace)::", "").rpartition("::")[2]: (int(offset, 16), int(size, 16))
        for offset, size, symbol in found
        if "(anonymous namespace)::" in symbol and "emu::" not in symbol and "(" not in symbol.split("::")[-1]
    }


def places(library: Path, offsets: Sequence[int]) -> list[str]:
    """Return `file:line` of places in the code of a library, calls that were inlined included, innermost first.

    Without `addr2line`, which comes with g++, there are none. Places in the emulator's own code are left out.
    """
    if not offsets or shutil.which("addr2line") is None:
        return []
    lines = tool_output(["addr2line", "-i", "-e", str(library), *map(hex, offsets)]).stdout.splitlines()
    found = [re.match(r"(.*):(\d+)", line) for line in lines]
    return [source_place(match[1], match[2]) for match in found if match and is_own_code(match[1])]


def is_own_code(path: str) -> bool:
    """Whether a file named in debugging information is the kernel's, not the emulator's or the system's."""
    is_system = path.startswith(("/usr/", "/lib", "../", "<", "??"))
    return not is_system and _HEADERS not in path and not re.search(r"[0-9a-f]{24}\.cpp$|^(?:/kernel/)?exports$", path)


def source_place(path: str, line: str) -> str:
    """Return `file:line` with the file as the source names it."""
    return f"{path.removeprefix(FOLDER + '/')}:{line}"
