"""A progress bar in a terminal or a notebook, with tqdm; nothing otherwise."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def with_progress(items: Iterable[T], total: int, label: str, unit: str, show: bool = True) -> Iterator[T]:
    """Iterate over `items`, with a bar on standard error or in the notebook's cell.

    Parameters
    ----------
    items : iterable
    total : int
    label, unit : str
    show : bool
    """
    if not show:
        return iter(items)
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return iter(items)
    is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    return iter(tqdm(items, total=total, desc=label, unit=unit, disable=not is_seen))
