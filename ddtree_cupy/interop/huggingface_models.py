"""Causal models of Hugging Face as target and drafter of `decode.generate`; torch is imported inside methods only."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import DraftTree
from ddtree_cupy.errors import DTypeError, UnsupportedError
from ddtree_cupy.interop._host import Call
from ddtree_cupy.interop.huggingface import to_huggingface

Array = Any
PREFILL_TOKENS = 128  # of one prefill pass
MASKED_ATTENTION = ("eager", "sdpa")  # the implementations that take a 4D mask


class _CachedModel:
    """A model, its cache of the text, and the tokens before the root whose keys are not in the cache yet."""

    def __init__(self, model: Any) -> None:
        call = Call(type(self).__name__)
        config: Any = getattr(model, "config", None)
        if not callable(model) or not hasattr(config, "vocab_size") or not hasattr(model, "dtype"):
            raise call.error(
                f"`model` is {type(model).__name__}, expected a causal model of transformers, such as "
                "AutoModelForCausalLM.from_pretrained(...)",
                DTypeError,
            )
        attention = getattr(config, "_attn_implementation", None)
        if attention not in (None, *MASKED_ATTENTION):
            raise call.error(
                f"`model` attends by {attention!r}, which takes no 4D mask, expected 'eager' or 'sdpa': "
                "from_pretrained(..., attn_implementation='sdpa') loads it so",
                UnsupportedError,
            )
        if getattr(model, "training", False):
            raise call.error("`model` is in training mode, in which dropout changes its logits; call `model.eval()`")
        self.model, self.vocab_size = model, call.integer("model.config.vocab_size", config.vocab_size, low=1)

    def start(self, prompt_ids: npt.NDArray[np.int32]) -> None:
        """Forget any text and run the prompt, without its last token."""
        self._cache: Any = None
        self._length = 0
        *known, root = prompt_ids.tolist()
        for start in range(0, len(known), PREFILL_TOKENS):
            piece = known[start : start + PREFILL_TOKENS]
            self._run(piece)
            self._length += len(piece)
        self._root = root
        self._pending: list[int] = []  # tokens before the root

    def _run(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Any:
        """Return the logits (n, V) of nodes after the cached text, a chain by default; their keys enter the cache."""
        import torch

        parents = range(-1, len(token_ids) - 1) if parents is None else parents
        tree = DraftTree.from_parents(list(token_ids), list(parents))
        arrays = to_huggingface(tree, self._length, hidden="-inf")
        inputs = {name: torch.from_numpy(array).to(self.model.device) for name, array in arrays.items()}
        inputs["attention_mask"] = inputs["attention_mask"].to(self.model.dtype)
        with torch.inference_mode():
            found = self.model(**inputs, past_key_values=self._cache, use_cache=True)
        self._cache = found.past_key_values
        return found.logits[0]

    def _forget(self) -> None:
        """Remove the keys after the first `_length` from the cache."""
        if self._length == 0:
            self._cache = None
        elif not hasattr(self._cache, "crop"):
            raise UnsupportedError(
                f"{type(self).__name__}: the cache of `model` is {type(self._cache).__name__}, expected one with "
                f"`crop`, such as transformers.DynamicCache"
            )
        else:
            self._cache.crop(self._length)

    @staticmethod
    def _on_host(logits: Any) -> npt.NDArray[Any]:
        host: npt.NDArray[Any] = (logits if str(logits.dtype) == "torch.float64" else logits.float()).cpu().numpy()
        return host


class HuggingFaceTarget(_CachedModel):
    """A causal model of Hugging Face as a `decode.StatefulTarget`: one pass verifies a tree, through a 4D mask.

    `model` is a transformers.PreTrainedModel in evaluation mode, attending by "eager" or "sdpa", with full attention
    over a cache that has `crop`, such as DynamicCache.

    Attributes
    ----------
    vocab_size : int

    Raises
    ------
    DTypeError, ArgumentError, UnsupportedError
        `model` is something else.

    Notes
    -----
    After each round the cache is cut back to the text that it had before, and the next pass runs the accepted tokens
    again, in front of its tree, so that only the public `crop` of a cache is needed. The logits come to the host.
    Needs the extra `hf`. At temperature 0 the text equals plain decoding as long as a pass over many tokens gives the
    same argmax as a pass over one: always in float64 as far as tested, not always in 16 bits.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM  # doctest: +SKIP
    >>> target = HuggingFaceTarget(AutoModelForCausalLM.from_pretrained("a-large-model").eval())  # doctest: +SKIP
    >>> drafter = HuggingFaceDrafter(AutoModelForCausalLM.from_pretrained("a-small-one").eval(), 5)  # doctest: +SKIP
    >>> decode.generate(target, drafter, prompt_ids, budget=16, max_new_tokens=64)  # doctest: +SKIP
    """

    def verify(self, tree: DraftTree) -> npt.NDArray[Any]:
        """Return logits (N, V); see `decode.StatefulTarget`.

        Parameters
        ----------
        tree : DraftTree
        """
        before, count = self._pending, len(self._pending)
        parents = [*range(-1, count - 1), count - 1, *(tree.parents[1:] + count).tolist()]
        self._token_ids = tree.token_ids
        logits = self._run([*before, *tree.token_ids.tolist()], parents)[count:]
        self._length += count
        self._pending = []
        self._forget()
        return self._on_host(logits)

    def commit(self, accepted: npt.NDArray[np.int32]) -> None:
        """Extend the text; see `decode.StatefulTarget`.

        Parameters
        ----------
        accepted : int32 array, shape (n,)
        """
        self._pending += self._token_ids[accepted].tolist()


class HuggingFaceDrafter(_CachedModel):
    """A causal model of Hugging Face as a `decode.StatefulDrafter`: one pass per row, along its own likeliest tokens.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As in `HuggingFaceTarget`, with the target's vocabulary.
    draft_len : int
        Rows of a draft, L.

    Attributes
    ----------
    draft_len, vocab_size : int

    Raises
    ------
    DTypeError, ArgumentError, UnsupportedError
        `model` or `draft_len` is something else.
    """

    def __init__(self, model: Any, draft_len: int) -> None:
        super().__init__(model)
        self.draft_len = Call("HuggingFaceDrafter").integer("draft_len", draft_len, low=0)

    def propose(self) -> npt.NDArray[Any]:
        """Return logits (L, V); see `decode.StatefulDrafter`."""
        rows = np.zeros((self.draft_len, self.vocab_size), np.float32)
        token_ids, length = [*self._pending, self._root], self._length + len(self._pending)
        for row in range(self.draft_len):
            logits = self._on_host(self._run(token_ids)[-1])
            rows = rows.astype(logits.dtype, copy=False)
            rows[row] = logits
            self._length += len(token_ids)
            token_ids = [int(logits.argmax())]
        if self.draft_len:
            self._length, self._pending = length, []
            self._forget()
        return rows

    def commit(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Extend the text; see `decode.StatefulDrafter`.

        Parameters
        ----------
        token_ids : int32 array, shape (n,)
        """
        *before, root = token_ids.tolist()
        self._pending += [self._root, *before]
        self._root = root
