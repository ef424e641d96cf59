"""The fixture of tests that run v3 as another device would."""

from functools import partial

import pytest

from ddtree_cupy.tree_attention import kernel
from ddtree_cupy.tree_attention.versions import v3_mma


@pytest.fixture
def plan_with(monkeypatch):
    """Return a function that gives v3's `plan` options which the device decides otherwise."""
    plan = v3_mma.plan
    monkeypatch.setattr(kernel, "attention_plan", kernel.attention_plan.__wrapped__)  # no plans of earlier tests
    return lambda **options: monkeypatch.setattr(v3_mma, "plan", partial(plan, **options))
