"""What compute-sanitizer says of the planted bugs on this GPU: `python tests/sanitizer/planted.py`, a minute or two.

The kernels are those of tests/emulate/planted_bugs.py, compiled by CuPy; each runs in a process of its own.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.emulate.planted_bugs import BUGS  # noqa: E402

TOOLS = {"": (), "memcheck": ("--padding", "64"), "racecheck": (), "initcheck": (), "synccheck": ()}
SCALARS = {"int": np.int32, "unsigned": np.uint32, "float": np.float32, "long long": np.int64}
SECONDS = 25


def launch(name, is_wrong):
    """Run one kernel; print whether its results are right."""
    import cupy

    cupy.cuda.set_allocator(None)  # a pool would hide what is out of bounds
    bug = next(bug for bug in BUGS if bug.name == name)
    body = bug.code.replace("{}", bug.wrong if is_wrong else bug.right)
    code = f'extern "C" __global__ void k({bug.parameters}) {{\n{body}\n}}'
    kernel, case = cupy.RawModule(code=code, options=("-lineinfo",)).get_function("k"), bug.case(bug.shows)
    kinds = [parameter.strip().rpartition(" ")[0] for parameter in bug.parameters.split(",")]
    args = [
        cupy.asarray(value) if isinstance(value, np.ndarray) else SCALARS[kind](value)
        for value, kind in zip(case.args, kinds, strict=True)
    ]
    kernel((case.grid,), (case.block,), tuple(args), shared_mem=case.shared_mem)
    wrong = [place for place, right in case.results.items() if not np.array_equal(args[place].get(), right)]
    print("RESULT", "wrong" if wrong else "right")


def verdict(name, which, tool):
    """Return "found", or how the process ended otherwise."""
    command = [sys.executable, __file__, name, which]
    if tool:
        command = ["compute-sanitizer", "--error-exitcode", "99", "--tool", tool, *TOOLS[tool], *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 99 and "CompileException" not in done.stderr + done.stdout:
        return "found"
    if "RESULT" in done.stdout:
        return "wrong" if "RESULT wrong" in done.stdout else "-"
    return "no CUDA" if "CompileException" in done.stderr + done.stdout else "error"


def main():
    """Print a table; exit code 1 if a right kernel is reported."""
    jobs = [(bug.name, which, tool) for bug in BUGS for which in ("wrong", "right") for tool in TOOLS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(jobs, pool.map(lambda job: verdict(*job), jobs), strict=True))
    print(f"{'fault':<34}" + "".join(f"{tool or 'result':<11}" for tool in TOOLS))
    for bug in BUGS:
        print(f"{bug.name:<34}" + "".join(f"{found[bug.name, 'wrong', tool]:<11}" for tool in TOOLS))
    healthy = [job for job, said in found.items() if job[1] == "right" and said in ("found", "wrong", "hangs")]
    print("right kernels that were reported:", healthy or "none")
    return bool(healthy)


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1], sys.argv[2] == "wrong") if len(sys.argv) > 1 else main())
