"""Every snippet that NVRTC accepts gives the right answer on the emulator, or is refused by the name of the feature."""

from pathlib import Path

import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.compile_check import nvrtc
from ddtree_cupy.emulate._refusals import REFUSALS, table
from ddtree_cupy.errors import CompileError
from tests.emulate.sweep import SNIPPETS

pytestmark = [pytest.mark.emulate, pytest.mark.slow]

COMMON = """#define KERNEL __global__ void
template <class T> __device__ float saturate(T v) { return __saturatef(v + 1.0f); }
"""
RUN = [snippet for snippet in SNIPPETS if not snippet.refused]
REFUSED = [snippet for snippet in SNIPPETS if snippet.refused]
BATCH = 40


def source(snippets):
    """Return one text with a kernel `s0`, `s1`, ... for each snippet."""
    includes = {line: None for s in snippets for line in s.declarations.splitlines() if line.startswith("#include")}
    aliases = "namespace cg = cooperative_groups;\n" if any("cg =" in s.declarations for s in snippets) else ""
    kernels = []
    for at, snippet in enumerate(snippets):
        lines = [
            line for line in snippet.declarations.splitlines() if not line.startswith(("#include", "namespace cg"))
        ]
        kernels.append("\n".join(lines))
        kernels.append(f'extern "C" {snippet.qualifiers} s{at}(double* y) {{\nint t = threadIdx.x;\n{snippet.body}\n}}')
    return "\n".join([*includes, COMMON, aliases, *kernels])


def batches(snippets):
    return [snippets[first : first + BATCH] for first in range(0, len(snippets), BATCH)]


@pytest.mark.nvrtc
@pytest.mark.parametrize("needs_libcu", [False, True])
def test_nvrtc_accepts_the_snippets(needs_libcu):
    available, reason = nvrtc.available()
    if not available:
        pytest.skip(reason)
    if needs_libcu and not any((Path(folder) / "nv" / "target").exists() for folder in nvrtc.header_folders()):
        pytest.skip("the headers of libcu++ come with CuPy, not with NVRTC")
    for batch in batches([snippet for snippet in RUN if snippet.needs_libcu == needs_libcu]):
        nvrtc.compile_text(source(batch), "sm_90")


@pytest.mark.parametrize("batch", batches(RUN), ids=range(len(batches(RUN))))
@pytest.mark.parametrize("seed", [0, 1])
def test_snippets_give_the_right_answer(batch, seed):
    module, wrong = emulate.Module(source(batch)), []
    for at, snippet in enumerate(batch):
        y = np.zeros(32)
        module.get_function(f"s{at}")((1,), (32,), (y,), seed=seed)
        right = snippet.expected
        wanted = [right(t) for t in range(32)] if callable(right) else [right] * 32
        if not np.allclose(y, wanted, rtol=1e-6):
            wrong.append((snippet.section, snippet.body, y[:4].tolist(), wanted[:4]))
    assert not wrong


@pytest.mark.parametrize("snippet", REFUSED, ids=lambda snippet: snippet.body[:40])
def test_other_features_are_refused_by_name(snippet):
    with pytest.raises(CompileError, match=r"^kernel\.cu:\d+: ") as caught:
        emulate.Module(source([snippet]))
    first = str(caught.value).splitlines()[0]
    refusal = next(refusal for refusal in REFUSALS if refusal.feature.startswith(snippet.refused))
    assert first.endswith(f"{refusal.feature}: not in the emulator; {refusal.instead}")


def test_the_sweep_is_wide():
    assert len(SNIPPETS) >= 200
    assert len({snippet.section for snippet in SNIPPETS}) >= 20


def test_the_page_lists_the_refusals():
    page = (Path(__file__).parents[2] / "docs" / "check_kernels.md").read_text("utf-8")
    assert table() in page
