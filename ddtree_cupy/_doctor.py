"""What is installed here, which backends work, and why the others do not."""

import platform
from importlib import metadata
from typing import Any

PACKAGES = ("numpy", "scipy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "hypothesis", "pytest", "matplotlib", "tqdm")


def report() -> dict[str, Any]:
    """Return versions and, for every backend, whether it works and the reason if not."""
    return {
        "ddtree_cupy": metadata.version("ddtree-cupy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backends": {"numpy": {"works": True, "reason": "always there"}},
    }


def as_text(found: dict[str, Any]) -> str:
    """Return the report as aligned lines."""
    lines = [f"ddtree_cupy {found['ddtree_cupy']}, Python {found['python']}, {found['platform']}", "", "packages"]
    lines += [f"  {name:<14}{version or 'not installed'}" for name, version in found["packages"].items()]
    lines += ["", "backends"]
    for name, backend in found["backends"].items():
        lines.append(f"  {name:<14}{'works' if backend['works'] else 'does not work'}: {backend['reason']}")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
