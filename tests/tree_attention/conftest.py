"""The fixture of tests that run a version as another device would."""

from functools import partial

import pytest

from ddtree_cupy.tree_attention import kernel
from ddtree_cupy.tree_attention.versions import v3_mma


@pytest.fixture
def plan_with(monkeypatch):
    """Return a function that gives a version's `plan` options which the device decides otherwise."""
    monkeypatch.setattr(kernel, "attention_plan", kernel.attention_plan.__wrapped__)  # no plans of earlier tests
    plans = {}

    def change(version=v3_mma, **options):
        plan = plans.setdefault(version, version.plan)
        monkeypatch.setattr(version, "plan", partial(plan, **options))

    return change
