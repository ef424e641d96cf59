"""What each kernel takes on each architecture: registers, spills, stack, shared memory.

The numbers come from ptxas, through NVRTC's log, so no GPU is needed. `kernel_table` is what `ddtree kernels` prints;
`problems` lists the rows that break the limits of their specs.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ddtree_cupy._terminal import table
from ddtree_cupy.compile_check import nvrtc
from ddtree_cupy.errors import CompileError
from ddtree_cupy.kernels.registry import registered_specs
from ddtree_cupy.kernels.spec import KernelSpec

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
# Shared memory one block may use after opting in, from NVIDIA's programming guide.
SHARED_LIMIT = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99}

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FIELDS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spill_store_bytes": re.compile(r"(\d+) bytes spill stores"),
    "spill_load_bytes": re.compile(r"(\d+) bytes spill loads"),
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "static_shared_bytes": re.compile(r"(\d+) bytes smem"),
    "barriers": re.compile(r"used (\d+) barriers"),
}


@dataclass(frozen=True)
class Resources:
    """One kernel on one architecture."""

    source: str
    kernel: str
    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    barriers: int
    compile_seconds: float = 0.0


def parse_log(log: str) -> dict[str, dict[str, int]]:
    """Return ptxas's numbers per mangled kernel name from a `--ptxas-options=-v` log."""
    found: dict[str, dict[str, int]] = {}
    starts = list(_ENTRY.finditer(log))
    for i, start in enumerate(starts):
        end = starts[i + 1].start() if i + 1 < len(starts) else len(log)
        part = log[start.end() : end]
        matches = {name: pattern.search(part) for name, pattern in _FIELDS.items()}
        found[start.group(1)] = {name: int(match.group(1)) if match else 0 for name, match in matches.items()}
    return found


def archs_of(spec: KernelSpec, archs: Sequence[str]) -> tuple[str, ...]:
    """Return which of `archs` a spec is compiled for: its own special one, or all the plain ones."""
    if spec.arch_specific is not None:
        return tuple(arch for arch in archs if arch == spec.arch_specific)
    plain = (arch for arch in archs if not arch.endswith(("a", "f")))
    return tuple(arch for arch in plain if spec.archs is None or arch in spec.archs)


def kernel_table(archs: Sequence[str] = ARCHS, specs: Sequence[KernelSpec] | None = None) -> list[Resources]:
    """Compile kernels for each architecture and return one row for each pair.

    Parameters
    ----------
    archs : sequence of str
    specs : sequence of KernelSpec, optional
        Default: every registered one.

    Raises
    ------
    CompileError
        A kernel does not compile; the message names file, line, architecture and NVRTC version.
    UnsupportedError
        NVRTC is not installed.
    """
    chosen = registered_specs() if specs is None else tuple(specs)
    groups: dict[tuple[str, str, tuple[str, ...]], list[KernelSpec]] = {}
    for spec in chosen:
        for arch in archs_of(spec, archs):
            groups.setdefault((spec.text(), arch, spec.compiler_options), []).append(spec)
    rows = [row for key, members in groups.items() for row in _compile_group(*key, members)]
    order = {spec: i for i, spec in enumerate(chosen)}
    position = {(spec.source, spec.name): order[spec] for spec in chosen}
    return sorted(rows, key=lambda row: (position[row.source, row.kernel], archs.index(row.arch)))


def _compile_group(text: str, arch: str, options: tuple[str, ...], members: list[KernelSpec]) -> list[Resources]:
    expressions = tuple(spec.entry for spec in members if spec.is_template)
    start = time.perf_counter()
    result = nvrtc.compile_text(text, arch, options=options, expressions=expressions, name=members[0].source)
    seconds = (time.perf_counter() - start) / len(members)
    numbers = parse_log(result.log)
    rows = []
    for spec in members:
        mangled = result.lowered.get(spec.entry, spec.entry)
        if mangled not in numbers:
            raise CompileError(f"{spec.label} for {arch}: no such kernel; compiled were {', '.join(numbers) or 'none'}")
        rows.append(Resources(spec.source, spec.name, arch, **numbers[mangled], compile_seconds=round(seconds, 3)))
    return rows


def problems(rows: Sequence[Resources], specs: Sequence[KernelSpec] | None = None) -> list[str]:
    """Return one line for every limit of a spec that a row breaks: registers, spills, shared memory."""
    chosen = registered_specs() if specs is None else tuple(specs)
    by_name = {(spec.source, spec.name): spec for spec in chosen}
    found = []
    for row in rows:
        spec = by_name[row.source, row.kernel]
        name = f"{spec.label} on {row.arch}"
        if row.registers > spec.max_registers:
            found.append(f"{name}: {row.registers} registers, at most {spec.max_registers}")
        spilled = max(row.spill_store_bytes, row.spill_load_bytes)
        if spilled > spec.max_spill_bytes:
            found.append(f"{name}: {spilled} bytes spilled, at most {spec.max_spill_bytes}")
        if row.registers * spec.max_threads > 65_536:
            found.append(f"{name}: {row.registers} registers x {spec.max_threads} threads do not fit 65,536")
        limit = SHARED_LIMIT.get(re.sub(r"\D", "", row.arch))
        if limit is not None and spec.max_shared_bytes > limit * 1024:
            found.append(f"{name}: {spec.max_shared_bytes} bytes of shared memory, the architecture has {limit} KiB")
        if row.static_shared_bytes > spec.max_shared_bytes:
            found.append(f"{name}: {row.static_shared_bytes} bytes of static shared memory exceed max_shared_bytes")
    return found


def format_table(rows: Sequence[Resources]) -> str:
    """Return the rows as aligned text."""
    heads = ("kernel", "arch", "registers", "spill", "stack", "shared", "seconds")
    cells = []
    for row in rows:
        spill = max(row.spill_store_bytes, row.spill_load_bytes)
        numbers = (row.registers, spill, row.stack_bytes, row.static_shared_bytes, f"{row.compile_seconds:.2f}")
        cells.append((f"{row.source}: {row.kernel}", row.arch, *numbers))
    return table(heads, cells, left=2)


def as_json(rows: Sequence[Resources]) -> list[dict[str, str | int | float]]:
    """Return the rows as plain dictionaries."""
    return [asdict(row) for row in rows]
