"""A report on this machine: what is installed, which backends work, and why the others do not."""

import os
import platform
from importlib import metadata
from typing import Any

from ddtree_cupy import __version__, emulate
from ddtree_cupy._terminal import escaped, fitted
from ddtree_cupy.compile_check import nvrtc
from ddtree_cupy.emulate import env
from ddtree_cupy.errors import DDTreeError, MissingGPUError
from ddtree_cupy.kernels import device

PACKAGES = ("numpy", "scipy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "hypothesis", "pytest", "matplotlib", "tqdm")


def report() -> dict[str, Any]:
    """Return versions and, for every backend, whether it works and the reason if not."""
    emulator_works, emulator_reason = emulate.available()
    nvrtc_works, nvrtc_reason = nvrtc.available()
    return {
        "ddtree_cupy": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backends": {
            "numpy": {"works": True, "reason": "always available"},
            "emulate": {
                "works": emulator_works,
                "reason": f"compiler {emulate.compiler()}" if emulator_works else emulator_reason,
            },
            "cupy": _cupy(),
        },
        "compile check": {
            "works": nvrtc_works,
            "reason": "NVRTC {}.{}".format(*nvrtc.version()) if nvrtc_works else nvrtc_reason,
        },
        "folders": {
            "emulated kernels": _cache_folder() if emulator_works else "none",
            "CuPy kernels": os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache"),
        },
    }


def _cache_folder() -> str:
    try:
        return str(env.cache_dir())
    except DDTreeError as error:
        return str(error)


def _cupy() -> dict[str, Any]:
    try:
        current = device.current_device()
    except MissingGPUError as error:
        return {"works": False, "reason": " ".join(str(error).split())}
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(current)["name"].decode()
    driver = cupy.cuda.runtime.driverGetVersion()
    compiler = "{}.{}".format(*device.nvrtc_version())
    capability = cupy.cuda.Device(current).compute_capability
    return {
        "works": True,
        "reason": f"{name}, sm_{capability}, driver for CUDA {driver // 1000}.{driver % 1000 // 10}, NVRTC {compiler}",
    }


def as_text(found: dict[str, Any]) -> str:
    """Return the report as aligned lines."""
    lines = [f"ddtree_cupy {found['ddtree_cupy']}, Python {found['python']}, {found['platform']}", "", "packages"]
    lines += [f"  {name:<14}{version or 'not installed'}" for name, version in found["packages"].items()]
    lines += ["", "backends"]
    for name, backend in (*found["backends"].items(), ("compile check", found["compile check"])):
        lines.append(f"  {name:<14}{'works' if backend['works'] else 'does not work'}: {escaped(backend['reason'])}")
    lines += ["", "folders", *(f"  {name:<17}{escaped(folder)}" for name, folder in found["folders"].items())]
    return "\n".join(fitted(line, " " * 16) for line in lines)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
