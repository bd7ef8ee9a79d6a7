"""Made-up devices, and the tensor names of families as their files hold them, for tests of where weights live.

Owns: names and sizes only. Must not know what is decided about them.
"""

from __future__ import annotations

from vllm_cpp.quants import ENCODINGS
from vllm_cpp.residency.devices import Device
from vllm_cpp.residency.inventory import Inventory, Weight

GIB = 1 << 30
CARD = Device(name="cuda", total_bytes=24 * GIB, stages_weights=True, host_addressable=False)
INTEGRATED = Device(name="cuda", total_bytes=16 * GIB, stages_weights=True, host_addressable=True)
UNPROBED = Device(name="cuda", total_bytes=None, stages_weights=True, host_addressable=False)
READS_IN_PLACE = Device(name="vulkan", total_bytes=GIB, stages_weights=False, host_addressable=True)

ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
SEPARATE = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
# Of each family: (layers, parts of every layer, towers, layers that have them)
FAMILIES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], range]] = {
    "qwen3moe": (4, (*ATTENTION, "ffn_gate_inp"), SEPARATE, range(4)),
    "qwen35moe": (4, ("ssm_out", "attn_norm", "ffn_up_shexp", "ffn_gate_inp"), ("ffn_gate_up_exps", "ffn_down_exps"), range(4)),
    "nemotron_h_moe": (6, ("ssm_in", "ffn_gate_inp", "ffn_latent_down"), ("ffn_up_exps", "ffn_down_exps"), range(1, 6, 2)),
    "deepseek2": (5, ("attn_kv_a_mqa", "attn_k_b", "ffn_up_shexp", "exp_probs_b"), SEPARATE, range(1, 5)),
    "grovemoe": (2, ATTENTION, (*SEPARATE, "ffn_gate_chexps", "ffn_up_chexps", "ffn_down_chexps"), range(2)),
    "llama": (3, (*ATTENTION, "ffn_gate", "ffn_up", "ffn_down"), (), range(0)),
}


def weight(name: str, *shape: int, encoding: str = "Q4_K") -> Weight:
    """A weight of this shape (towers: experts first), in numpy order."""
    values = 1
    for n in shape:
        values *= n
    rows = values // shape[-1]
    layer = int(name.split(".")[1]) if name.startswith("blk.") else None
    num_experts = shape[0] if "exps.weight" in name else 0
    n_bytes = rows * ENCODINGS[encoding].row_bytes(shape[-1])
    return Weight(name=name, layer=layer, encoding=encoding, n_bytes=n_bytes, num_values=values, num_experts=num_experts)


def inventory(architecture: str, encoding: str = "Q4_K", **encodings: str) -> Inventory:
    """A small file of a family. `encodings` gives single tower names another encoding, as ffn_up_exps="F32"."""
    num_layers, parts, towers, with_towers = FAMILIES[architecture]
    weights = [weight("token_embd.weight", 512, 256, encoding=encoding), weight("output.weight", 512, 256, encoding=encoding)]
    for layer in range(num_layers):
        weights += [weight(f"blk.{layer}.{part}.weight", 256, 256, encoding=encoding) for part in parts]
        if layer in with_towers:
            weights += [weight(f"blk.{layer}.{tower}.weight", 8, 256, 256, encoding=encodings.get(tower, encoding)) for tower in towers]
    return Inventory(architecture=architecture, num_layers=num_layers, weights=tuple(weights), top_k=dict.fromkeys(range(num_layers), 2))
