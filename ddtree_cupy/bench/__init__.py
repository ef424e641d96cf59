"""Benchmarks: cases as data, compared with the reference before they are timed.

``python -m ddtree_cupy.bench`` (or ``ddtree bench``) prints one table an op; ``--json`` one object.
"""
