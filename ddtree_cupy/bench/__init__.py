"""Benchmarks: cases as data, compared with the reference before they are timed.

``python -m ddtree_cupy.bench`` (or ``ddtree bench``) prints one table, or one object with ``--json``; ``--save FOLDER``
also saves the report. From those in the folder of `measurements`, ``python -m ddtree_cupy.bench.tables`` writes the
tables of the README.
"""
