"""Run the GPU tests under compute-sanitizer, all tools side by side: `python tests/sanitizer/run.py [tool ...]`.

The memory pool is off (a pooled allocator hides accesses out of bounds) and Hypothesis draws five examples a test.

Open: racecheck (CUDA 13.0, 2026-11-30) reports tree_attention_v3, whose warps hand over by bar.arrive and bar.sync. The
PTX ISA orders those accesses and ThreadSanitizer, on the emulator, agrees; whether the tool errs has not been shown.
"""

import collections
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = {
    "memcheck": ("--padding", "64"),
    "racecheck": (),
    "synccheck": (),
    "initcheck": (),
}


def start(tool, log):
    # torch and cuBLAS have findings of their own; only our kernels are judged
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "99",
        *TOOLS[tool],
        sys.executable,
        "-m",
        "pytest",
    ]
    command += ["-q", "-m", "gpu", "--require-gpu", "--no-pool", "-p", "no:cacheprovider", "-k", "kernels"]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "sanitize", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def kernels_named(text):
    """Count the reports by the kernel they name first."""
    reports = re.findall(r"^=+ *(?:Error|Warning): .*", text, re.MULTILINE)
    return collections.Counter(match[0] for report in reports if (match := re.search(r"\w+(?=[<(])", report)))


def main(tools):
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    runs = {}
    for tool in tools:
        with (folder / tool).open("w") as log:
            runs[tool] = start(tool, log)
    failed = False
    for tool, process in runs.items():
        code = process.wait()
        text = (folder / tool).read_text()
        failed |= code != 0
        summary = [
            line for line in text.splitlines() if "ERROR SUMMARY" in line or " passed" in line or "RACECHECK" in line
        ]
        print(f"{tool}: exit {code} after {time.perf_counter() - began:.0f} s; {'; '.join(summary[-3:])}")
        if code:
            for kernel, number in kernels_named(text).most_common():
                print(f"  {number} reports name {kernel}")
            print(text[:2000], "...", text[-2000:], sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(TOOLS)))
