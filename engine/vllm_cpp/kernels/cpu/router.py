"""From router logits to chosen experts and their weights, and the pairs sorted by expert.

Owns the choice (ties go to the lower expert) and the weights. Must not know towers: `moe.py` computes with what is chosen here.
"""

from __future__ import annotations

# How logits become probabilities (`scores`).
SOFTMAX = 0  # softmax over all experts
SIGMOID = 1
SOFTMAX_CHOSEN = 2  # chosen by the logits themselves, softmax over the chosen ones only

ROUTER_FIELDS = (
    "count",  # address of the int64 number of tokens
    "logits", "logits_stride",  # f32[n_tokens, n_experts]; bytes between two rows
    "n_experts", "top_k",
    "scores",  # SOFTMAX, SIGMOID or SOFTMAX_CHOSEN
    "bias",  # f32[n_experts] added for the choice only, or 0
    "normalize",  # 1: weights are divided by max(their sum, 6.1035e-5)
    "scale",  # float the weights are multiplied by (1.0: none)
    "ids",  # out i32[n_tokens, top_k], by falling score
    "weights",  # out f32[n_tokens, top_k]
    "scratch", "scratch_stride",  # per thread: scratch_bytes(n_experts)
)  # fmt: skip
(_COUNT, _LOGITS, _LOGITS_STRIDE, _N_EXPERTS, _TOP_K, _SCORES, _BIAS, _NORMALIZE, _SCALE, _IDS, _WEIGHTS, _SCRATCH,
 _SCRATCH_STRIDE) = range(len(ROUTER_FIELDS))  # fmt: skip

GROUP_FIELDS = (
    "count",  # address of the int64 number of pairs (tokens * top_k)
    "ids",  # i32[n_pairs]
    "n_experts",
    "offsets",  # out i32[n_experts + 1]
    "pairs",  # out i32[n_pairs]: pair numbers (token * top_k + slot) by expert, then by number
)
_G_COUNT, _G_IDS, _G_N_EXPERTS, _G_OFFSETS, _G_PAIRS = range(len(GROUP_FIELDS))


def scratch_bytes(n_experts: int) -> int:
    """Bytes a thread needs: two f32 rows of n_experts, padded to whole vectors."""
    return 2 * 4 * ((n_experts + 15) // 16 * 16)
