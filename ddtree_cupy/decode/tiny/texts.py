"""Held-out text that the bundled models have never seen; it ships in `heldout/`, under the licence beside it."""

from pathlib import Path

HELDOUT_DIR = Path(__file__).parent / "heldout"


def heldout_names() -> list[str]:
    """Return the names of the shipped held-out files, sorted."""
    return sorted(path.stem for path in HELDOUT_DIR.glob("*.txt"))


def heldout_text(name: str) -> bytes:
    """Return one held-out file, e.g. ``heldout_text("textwrap")``."""
    return (HELDOUT_DIR / f"{name}.txt").read_bytes()
