"""Toy models whose every probability is known, for tests of the loop itself."""

import numpy as np

from ddtree_cupy import PagedKV, write_kv


class TableTarget:
    """A target whose logits are a hash of the whole text, read back from the cache it was told to keep.

    The cache rows hold the token ids, so a row that commit_kv moves wrongly changes the text.
    """

    def __init__(self, vocab_size=5, seed=0, sharpness=2.0):
        self.vocab_size, self.seed, self.sharpness = vocab_size, seed, sharpness
        self.passes = 0

    def allocate(self, max_context, max_nodes):
        return (PagedKV.allocate(max_context + max_nodes, page_size=3, head_dim_ckv=1, head_dim_kpe=1),)

    def logits_after(self, text):
        rng = np.random.default_rng([self.seed, *text])
        return self.sharpness * rng.standard_normal(self.vocab_size)

    def forward(self, tree, kv):
        self.passes += 1
        (cache,) = kv
        count, context_len = int(tree.num_nodes), int(cache.context_lens)
        rows = tree.token_ids[:, None].astype(np.float32)
        write_kv(cache, rows, rows, num_rows=count)
        pages, slots = cache.locate("TableTarget", np.arange(context_len))
        context = cache.ckv[pages, slots, 0].astype(int).tolist()
        visibility = tree.visibility
        logits = np.full((len(tree.token_ids), self.vocab_size), np.nan)
        for node in range(count):
            path = [int(tree.token_ids[j]) for j in np.flatnonzero(visibility[node])]
            logits[node] = self.logits_after(context + path)
        return logits, rows


class NoisyDrafter:
    """A drafter that knows the target's table but sees only the text up to the root, and through noise."""

    draft_len = 4

    def __init__(self, target, noise=1.0):
        self.target, self.noise = target, noise

    def start(self):
        return []

    def observe(self, state, features):
        return [*state, *features[:, 0].astype(int).tolist()]

    def propose(self, state, root_token_id):
        text = [*state, root_token_id]
        rng = np.random.default_rng([7, len(text)])
        rows = []
        for _ in range(self.draft_len):
            logits = self.target.logits_after(text)
            rows.append(logits + self.noise * rng.standard_normal(self.target.vocab_size))
            text = [*text, int(np.argmax(logits))]
        return np.array(rows)


class TextTarget(TableTarget):
    """The same target in the form with a state of its own, and everything that it was told."""

    def start(self, prompt_ids):
        self.told = [("start", prompt_ids.tolist())]
        self.text = prompt_ids[:-1].tolist()
        prompt_ids[:] = -1  # it is the model's own

    def verify(self, tree):
        self.passes += 1
        self.tree = tree
        paths = {-1: []}
        for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
            paths[node] = [*paths[parent], token]
        return np.stack([self.logits_after(self.text + paths[node]) for node in range(len(tree.token_ids))])

    def commit(self, accepted):
        self.told.append(("commit", self.tree.token_ids[accepted].tolist()))
        self.text += self.told[-1][1]
        accepted[:] = -1


class TextDrafter(NoisyDrafter):
    """The same drafter in the form with a state of its own."""

    def start(self, prompt_ids):
        self.told = [("start", prompt_ids.tolist())]
        self.text = prompt_ids.tolist()
        prompt_ids[:] = -1

    def propose(self):
        return NoisyDrafter.propose(self, self.text[:-1], self.text[-1])

    def commit(self, token_ids):
        self.told.append(("commit", token_ids.tolist()))
        self.text += self.told[-1][1]
