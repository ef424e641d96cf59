"""Draft trees, masks and accepted paths in the forms of other systems, in both directions, on the host.

All functions take and return NumPy arrays; copy CuPy arrays to the host first. `to_*` checks that the form can hold the
value, and `from_*` that the value is valid here. What cannot be represented raises an error that says why. No form
holds `path_scores` or `status`, so these are lost. Names follow each system, so the dicts can be passed on unchanged.
Arguments that contradict each other or themselves (shapes, dtypes, lengths, options, arrays on a GPU) raise ShapeError,
DTypeError or ArgumentError.
"""

from ddtree_cupy.interop.ddtree_rounds import from_ddtree_rounds, to_ddtree_rounds
from ddtree_cupy.interop.flashinfer import FlashInferMask, from_flashinfer_mask, to_flashinfer_mask
from ddtree_cupy.interop.huggingface import (
    from_huggingface,
    from_huggingface_mask,
    to_huggingface,
    to_huggingface_mask,
)
from ddtree_cupy.interop.huggingface_models import HuggingFaceDrafter, HuggingFaceTarget
from ddtree_cupy.interop.parents import from_parent_lists, to_parent_lists, tree_from_visibility
from ddtree_cupy.interop.sglang import (
    TreeMaskMode,
    from_sglang,
    from_sglang_accept,
    from_sglang_mask,
    to_sglang,
    to_sglang_accept,
    to_sglang_mask,
)
from ddtree_cupy.interop.static_trees import (
    from_medusa_choices,
    from_vllm_token_tree,
    to_medusa_choices,
    to_vllm_token_tree,
)
from ddtree_cupy.interop.tensorrt_llm import (
    from_tensorrt_llm,
    from_tensorrt_llm_mask,
    to_tensorrt_llm,
    to_tensorrt_llm_mask,
)
from ddtree_cupy.interop.torch_tensors import from_torch, to_torch

__all__ = [
    "FlashInferMask",
    "HuggingFaceDrafter",
    "HuggingFaceTarget",
    "TreeMaskMode",
    "from_ddtree_rounds",
    "from_flashinfer_mask",
    "from_huggingface",
    "from_huggingface_mask",
    "from_medusa_choices",
    "from_parent_lists",
    "from_sglang",
    "from_sglang_accept",
    "from_sglang_mask",
    "from_tensorrt_llm",
    "from_tensorrt_llm_mask",
    "from_torch",
    "from_vllm_token_tree",
    "to_ddtree_rounds",
    "to_flashinfer_mask",
    "to_huggingface",
    "to_huggingface_mask",
    "to_medusa_choices",
    "to_parent_lists",
    "to_sglang",
    "to_sglang_accept",
    "to_sglang_mask",
    "to_tensorrt_llm",
    "to_tensorrt_llm_mask",
    "to_torch",
    "to_vllm_token_tree",
    "tree_from_visibility",
]
