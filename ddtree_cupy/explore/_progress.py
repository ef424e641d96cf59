"""A progress bar where there is a terminal and tqdm, nothing otherwise."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def with_progress(items: Iterable[T], total: int, label: str, unit: str, show: bool = True) -> Iterator[T]:
    """Iterate over `items`, with a bar on standard error.

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
        from tqdm import tqdm
    except ImportError:
        return iter(items)
    return iter(tqdm(items, total=total, desc=label, unit=unit, disable=not sys.stderr.isatty()))
