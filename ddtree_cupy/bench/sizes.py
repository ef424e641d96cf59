"""Every size that is measured."""

HEAD_DIM_CKV, HEAD_DIM_KPE, PAGE_SIZE = 512, 64, 64
VOCAB_SIZE, DRAFT_LEN = 163_840, 15

BUILD_SIZES = ((1, 16), (1, 64), (1, 256), (1, 1_024), (8, 64), (64, 64))  # (requests, budget)
TARGET_SIZES = ((1, 65), (8, 65))  # (requests, nodes)
COMMIT_SIZES = (1, 64)  # requests
LAYERS = 61  # of Kimi K2 and DeepSeek-V3
# (requests, heads, nodes, context) of the verification passes on which published kernels are compared
ATTENTION_SIZES = (
    (1, 8, 64, 8_192),
    (1, 8, 65, 8_192),
    (1, 8, 64, 32_768),
    (1, 8, 64, 131_072),
    (1, 64, 64, 1_024),
    (1, 64, 64, 8_192),
    (1, 64, 64, 32_768),
    (1, 64, 64, 131_072),
    (1, 128, 64, 8_192),
    (1, 128, 64, 131_072),
    (8, 8, 64, 8_192),
    (32, 8, 64, 4_096),
    (8, 64, 64, 8_192),
)
# the cost of a pass by its nodes, root included: the rows of explore's cost table. Powers of two fill row tiles of 64
# rows, one node more begins another.
TREE_SIZES = tuple(
    (1, heads, nodes, context)
    for heads in (8, 64)
    for context in (8_192, 131_072)
    for nodes in (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257)
)
# times over one size while the others stay: edges of row tiles and key tiles, odd heads, long contexts
CURVE_SIZES = tuple(
    dict.fromkeys(
        (
            *((1, heads, n, 8_192) for heads in (8, 64) for n in (1, 4, 8, 9, 16, 32, 63, 64, 65, 127, 128, 129, 256)),
            *((1, heads, 64, 8_192) for heads in (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 63, 64, 65, 96, 127, 128)),
            *((1, heads, 64, 2**power) for heads in (8, 64) for power in range(7, 19)),
            *((1, heads, 64, context) for heads in (8, 64) for context in (8_127, 8_128, 8_129, 8_193)),
            *((batch, 8, 64, 8_192) for batch in (1, 2, 3, 4, 8, 16, 32, 64)),
        )
    )
)


def attention_name(batch: int, heads: int, nodes: int, context: int) -> str:
    """Return the name of a case of tree_attention."""
    return f"B {batch} H {heads} N {nodes} T {context}"
