"""Run the GPU tests under compute-sanitizer, all tools side by side: `python tests/sanitizer/run.py [tool ...]`.

The memory pool is off (a pooled allocator hides accesses out of bounds) and Hypothesis draws five examples a test.

racecheck leaves versions out whose warps hand over by `bar.arrive`: the tool (CUDA 13.0) reports accesses which that
orders. arrive.py shows it on ten lines and is run beside it: once nothing is reported there, this script fails and asks
for the exclusion to go. ThreadSanitizer judges these versions on the emulator (`make tsan`).
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
sys.path.insert(0, str(ROOT))

from ddtree_cupy.tree_attention.versions import VERSIONS  # noqa: E402

# in the mangled name, where "I" begins the template arguments: not the merge kernels, which have longer names
ARRIVES = {
    f"{spec.entry.partition('<')[0]}I"
    for version in VERSIONS.values()
    for spec in version.specs()
    if version.TRAITS.arrives and spec.source == version.SOURCE
}
TOOLS = {
    "memcheck": ("--padding", "64"),
    "racecheck": tuple(part for name in ARRIVES for part in ("--kernel-name-exclude", f"kernel_substring={name}")),
    "synccheck": (),
    "initcheck": (),
}
SANITIZER = ("compute-sanitizer", "--error-exitcode", "99", "--tool")


def start(tool, log):
    # torch and cuBLAS have findings of their own; only our kernels are judged
    command = [*SANITIZER, tool, *TOOLS[tool], sys.executable, "-m", "pytest"]
    command += ["-q", "-m", "gpu", "--require-gpu", "--no-pool", "-p", "no:cacheprovider", "-k", "kernels"]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "sanitize", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def arrive_findings():
    """Run racecheck on a hand-over by `bar.sync` and on the same by `bar.arrive`."""
    command = [*SANITIZER, "racecheck", sys.executable, str(Path(__file__).with_name("arrive.py"))]
    return [
        subprocess.run([*command, form], capture_output=True, text=True, check=False) for form in ("sync", "arrive")
    ]


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
    if "racecheck" in tools:
        findings = arrive_findings()
        codes = [finding.returncode for finding in findings]
        print(f"racecheck on arrive.py: exit {codes[0]} with bar.sync, {codes[1]} with bar.arrive (99: hazards)")
        if codes != [0, 99]:
            failed = True
            print(f"  expected 0 and 99; if both are 0, racecheck follows bar.arrive: judge {ARRIVES} again")
            print(*(finding.stdout[-1000:] + finding.stderr[-1000:] for finding in findings), sep="\n")
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
