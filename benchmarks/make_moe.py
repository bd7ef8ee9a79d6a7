"""Makes a mixture-of-experts model that really speaks English out of a dense one, as large as you like.

Owns one construction. Every feed-forward block of a dense `llama` GGUF becomes `experts` experts; each holds the dense block with its
hidden units permuted in whole quant blocks, so every expert's bytes differ and every expert computes the same function. The weights of
the chosen experts sum to one, so the new model's logits equal the dense model's up to the order of summation. The router is random from a
seed: different tokens choose different experts. Slices mixed up, a stale slot or a wrong offset therefore show as garbage at once, and
the dense model is the oracle for any number of experts. Must not know where the dense file comes from.

    python -m benchmarks.make_moe dense.gguf moe.gguf --experts 16 --top-k 4

From SmolLM2-135M in Q4_1 an expert is three slices of 552,960 bytes in each of 30 layers, 50 MB: 16 experts make 0.85 GB, 512 make 25 GB.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.gguf_out import Plan, kept, key_values, text, u32, write
from vllm_cpp.gguf_file import GGUFModel, open_model

PROJECTIONS = ("ffn_gate", "ffn_up", "ffn_down")
ROUTER_SPREAD = 4.0  # of the logits of a normalized hidden state: far enough apart that no choice of experts hangs on a rounding
F32_ID = 0


def make(dense: Path, out: Path, *, experts: int = 16, top_k: int = 4, seed: int = 0, skew: float = 0.0) -> None:
    """Write `out`. The same arguments give the same bytes. `skew` > 0 makes some experts hotter than others.

    Raises ValueError for a model that this construction does not fit.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}, expected 1 to the number of experts ({experts})")
    with open_model(dense) as model:
        if model.architecture != "llama" or "blk.0.ffn_up.weight" not in model.tensors:
            raise ValueError(f"{dense}: architecture '{model.architecture}', {len(model.tensors)} tensors; expected a dense 'llama' model")
        rest = [kept(model, name) for name in model.tensors if name.split(".")[-2] not in PROJECTIONS]
        write(out, _key_values(model, experts, top_k), [*rest, *_experts(model, experts, seed, skew)])


def _key_values(model: GGUFModel, experts: int, top_k: int) -> list[bytes]:
    name = f"{model.kv.get('general.name', 'model')} upcycled to {experts} experts"
    counts = [u32("llama.expert_count", experts), u32("llama.expert_used_count", top_k)]
    return [*key_values(model, skip=("general.name", "general.size_label")), text("general.name", name), *counts]


def _experts(model: GGUFModel, experts: int, seed: int, skew: float) -> Iterator[Plan]:
    """A router and three towers per layer."""
    rng = np.random.default_rng(seed)
    n_embd = model.get_u32("llama.embedding_length")
    for layer in range(model.get_u32("llama.block_count")):
        down = model.tensors[f"blk.{layer}.ffn_down.weight"]
        num_blocks = down.shape[1] // down.encoding.block_values
        orders = np.stack([rng.permutation(num_blocks) for _ in range(experts)])
        router = rng.normal(0, ROUTER_SPREAD / n_embd**0.5, (experts, n_embd))
        if skew:  # most hidden states share a direction; a constant along it shifts an expert's mean score
            router += rng.normal(0, skew / n_embd**0.5, (experts, 1))
        router = router.astype("<f4")
        yield Plan(f"blk.{layer}.ffn_gate_inp.weight", router.shape, F32_ID, router.nbytes, lambda router=router: iter([router]))
        for projection in PROJECTIONS:
            info = model.tensors[f"blk.{layer}.{projection}.weight"]
            yield Plan(
                f"blk.{layer}.{projection}_exps.weight",
                (experts, *info.shape),
                info.encoding.ggml_id,
                experts * info.n_bytes,
                lambda name=info.name, orders=orders: _tower(model, name, orders),
            )


def _tower(model: GGUFModel, name: str, orders: np.ndarray) -> Iterator[np.ndarray]:
    """The slices of one tower: `orders` [experts, num_blocks] says which block of hidden units comes where in each."""
    info = model.tensors[name]
    rows = model.bytes_of(name).reshape(info.shape[0], -1)
    for order in orders:
        if ".ffn_down." in name:  # hidden units run along the rows: permute the quant blocks in each
            yield rows.reshape(len(rows), len(order), -1)[:, order]
        else:  # hidden units are the rows: permute them in runs of one block's length
            yield rows.reshape(len(order), -1)[order]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a mixture-of-experts GGUF that computes what a dense one does.")
    parser.add_argument("dense", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4, help="experts chosen for a token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skew", type=float, default=0.0, help="spread of a fixed score per expert; more than 0 makes some experts hot")
    args = parser.parse_args()
    make(args.dense, args.out, experts=args.experts, top_k=args.top_k, seed=args.seed, skew=args.skew)
    print(args.out)


if __name__ == "__main__":
    main()
