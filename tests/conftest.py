"""Hypothesis profiles, the `backend` fixture, and what a machine must have to run a marked test."""

import os

import pytest
from hypothesis import HealthCheck, settings

from ddtree_cupy import emulate
from ddtree_cupy.testing.backends import Backend

settings.register_profile("dev", max_examples=30, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=200, deadline=None, print_blob=True, derandomize=True)
settings.register_profile("gpu", max_examples=1000, deadline=None, print_blob=True)
settings.register_profile("soak", max_examples=5000, deadline=None, print_blob=True)
settings.register_profile(
    "sanitize",
    max_examples=5,
    deadline=None,
    print_blob=True,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

os.environ.pop("COLUMNS", None)  # tables are as wide as they need, whatever the terminal


def gpu_reason():
    """Return why no GPU can be used here, "" when one can."""
    try:
        import cupy

        return "" if cupy.cuda.runtime.getDeviceCount() > 0 else "no CUDA device"
    except Exception as error:  # an import error, a missing driver or an unwritable cache folder
        return f"{type(error).__name__}: {error}"


def poisoned_malloc(size):
    """Return pool memory filled with 0xFF (NaN, -1), so that a result no kernel wrote shows."""
    import cupy

    memory = cupy.get_default_memory_pool().malloc(size)
    stream = cupy.cuda.get_current_stream()
    if size and not stream.is_capturing():
        cupy.cuda.runtime.memsetAsync(memory.ptr, 0xFF, size, stream.ptr)
    return memory


GPU_REASON = gpu_reason()
EMULATOR_WORKS, EMULATOR_REASON = emulate.available()


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="fail, rather than skip, where there is no GPU")
    parser.addoption("--no-pool", action="store_true", help="give CuPy no memory pool, for compute-sanitizer")


def pytest_configure(config):
    if config.getoption("--require-gpu") and GPU_REASON:
        raise pytest.UsageError(f"--require-gpu: {GPU_REASON}")
    if not GPU_REASON:
        import cupy

        cupy.cuda.set_allocator(None if config.getoption("--no-pool") else poisoned_malloc)
    if os.environ.get("PLANTED_FAULT"):
        from tests import faults

        faults.plant(os.environ["PLANTED_FAULT"])


def pytest_report_header(config):
    gpu = f"GPU tests are skipped: {GPU_REASON}" if GPU_REASON else "GPU tests run"
    emulator = "works" if EMULATOR_WORKS else f"does not work: {EMULATOR_REASON}"
    return f"ddtree_cupy: {gpu}; emulator {emulator}; Hypothesis profile {settings.get_current_profile_name()}"


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # long ones first, so that none runs alone
    for item in items:
        if item.get_closest_marker("gpu") and GPU_REASON:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {GPU_REASON}"))
        if item.get_closest_marker("emulate") and not EMULATOR_WORKS:
            if os.environ.get("CI"):
                raise pytest.UsageError(f"the emulator must work on CI: {EMULATOR_REASON}")
            item.add_marker(pytest.mark.skip(reason=f"needs a C++ compiler: {EMULATOR_REASON}"))


KERNEL_BACKENDS = [
    pytest.param("emulate", marks=pytest.mark.emulate),
    pytest.param("cupy", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="session", params=["numpy", *KERNEL_BACKENDS])
def backend(request):
    """The three backends: one test body judges them all."""
    return Backend(request.param)


@pytest.fixture(scope="session", params=["numpy", KERNEL_BACKENDS[0]])
def host(request):
    """The two backends that work on the caller's own NumPy arrays."""
    return Backend(request.param)


@pytest.fixture(scope="session", params=KERNEL_BACKENDS)
def kernels(request):
    """The two backends that run CUDA text."""
    return Backend(request.param)


def pytest_terminal_summary(terminalreporter, config):
    if not GPU_REASON:
        ran = [r for r in terminalreporter.stats.get("passed", []) if "[cupy" in r.nodeid or "gpu" in r.keywords]
        terminalreporter.write_line(f"GPU tests that ran and passed: {len(ran)}")
