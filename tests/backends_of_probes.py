"""Run tests that were written for the references on the kernels too, by replacing the functions they call."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy.containers import PagedKV

IN_PLACE = {"write_kv", "commit_kv"}


def on_backend(backend, function):
    """Return `function` taking and giving NumPy arrays but running on `backend`; caches change in place."""
    if backend.name == "numpy":
        return function

    def call(*args, **options):
        if function.__name__.endswith("_targets") and args[0].dtype == np.float64:
            args = (np.ascontiguousarray(args[0], np.float32), *args[1:])  # kernels take no float64
        if any(kv.ckv.dtype == np.float64 for kv in _caches(args)):
            pytest.skip("kernels refuse float64, as test_kernels.py shows")
        if backend.name == "cupy" and any(kv.ckv.nbytes > 1 << 34 for kv in _caches(args)):
            pytest.skip("sparse on the host only; test_kernels_address_pools_beyond_2_31_elements is its GPU twin")
        placed_args, placed_options = backend.put((args, options))
        result = backend.run(function, *placed_args, **placed_options)
        if "out" in options:
            _fill(options["out"], backend.get(placed_options["out"]))
            return options["out"]
        if function.__name__ in IN_PLACE:
            _copy_back(args, placed_args, backend)
        return _with_pools(backend.get(result), args) if function.__name__ == "commit_kv" else backend.get(result)

    call.__name__ = function.__name__
    return call


def _fill(host, values):
    """Copy the arrays a call wrote back into the caller's own, in tuples and containers too."""
    if isinstance(host, np.ndarray):
        np.copyto(host, values)
        return
    pairs = (
        zip(host, values, strict=True)
        if isinstance(host, tuple | list)
        else zip(vars(host).values(), vars(values).values(), strict=True)
    )
    for mine, theirs in pairs:
        if mine is not None and not isinstance(mine, int):
            _fill(mine, theirs)


def _caches(args):
    for arg in args:
        if isinstance(arg, PagedKV):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _caches(arg)


def _copy_back(args, placed, backend):
    for host, device in zip(_caches(args), _caches(placed), strict=True):
        for name in ("ckv", "kpe"):
            if getattr(device, name) is not getattr(host, name):
                np.copyto(getattr(host, name), backend.get(getattr(device, name)))


def _with_pools(result, args):
    """Give the result the caller's own pools back, as an in-place call does."""
    hosts = list(_caches(args))
    if isinstance(result, PagedKV):
        return replace(result, ckv=hosts[0].ckv, kpe=hosts[0].kpe)
    return tuple(replace(kv, ckv=host.ckv, kpe=host.kpe) for kv, host in zip(result, hosts, strict=True))
