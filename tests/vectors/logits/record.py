"""Records what llama.cpp computes for a tiny model: a new case of this folder.

Owns which seeds make a fair judge, and the recordings' format. Must not know the engine beyond the reading of files. Needs llama.cpp's
libraries and its Python binding, as benchmarks/record_oracle.py does and says:

    LLAMA_CPP_LIB_PATH=build/bin LD_LIBRARY_PATH=build/bin PYTHONPATH=.:engine:tests:llama_cpp_python-0.3.36 \\
        python tests/vectors/logits/record.py qwen3moe 1 mix

Seeds are tried in order until the greedy tokens and the choice of experts are clear, and are the same with float activations.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record_oracle import Oracle, decoded_copy, ll, llama_cpp
from tiny_models import FAMILIES, TinyModel, build
from vllm_cpp.gguf_file import open_model
from vllm_cpp.gguf_file.hparams import Keys
from vllm_cpp.quants import by_id

FOLDER = Path(__file__).parent
STEPS = 12
LONG = 200  # a longer prompt's logits are not kept: they would be most of the file
# What a layer's router says, by the name of the tensor; of those a model has, the last one is what experts are chosen by.
SCORES = ("ffn_moe_logits", "ffn_moe_logits_biased", "ffn_moe_probs", "ffn_moe_probs_biased", "ffn_moe_probs_masked")


class Run:
    """One context on one thread, keys and values in F32, no flash attention. `scores`: by tensor name, what routers said of the tokens of
    the last call, where it `watches`. (Who watches makes llama.cpp compute one operation at a time, and round otherwise.)"""

    def __init__(self, oracle: Oracle, n_tokens: int, *, watches: bool = False) -> None:
        self._base = ctypes.CDLL(str(Path(os.environ["LLAMA_CPP_LIB_PATH"]) / "libggml-base.so"))
        self._base.ggml_get_name.restype = ctypes.c_char_p
        self._base.ggml_nbytes.restype = ctypes.c_size_t
        for name in ("ggml_get_name", "ggml_nbytes"):
            getattr(self._base, name).argtypes = [ctypes.c_void_p]
        self._base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._watch = ll.ggml_backend_sched_eval_callback(self._see)
        params = ll.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = -(-n_tokens // 256) * 256
        params.n_seq_max = params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 0
        params.type_k = params.type_v = 0
        params.offload_kqv = False
        if watches:
            params.cb_eval = self._watch
        self._context = ll.llama_init_from_model(oracle.model, params)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._vocab_size = oracle.vocab_size
        self._fed = 0
        self.scores: dict[str, np.ndarray] = {}

    def _see(self, tensor: int, asks: bool, _data: object) -> bool:
        name = self._base.ggml_get_name(tensor).decode()
        head, _, il = name.rpartition("-")
        wanted = head in SCORES and il.isdigit()
        if wanted and not asks:
            values = np.zeros(self._base.ggml_nbytes(tensor) // 4, np.float32)
            self._base.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
            self.scores[name] = values
        return wanted or not asks

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Logits [len(ids), vocab] of tokens that are decoded together."""
        batch = ll.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), self._fed + i, 1, 1
            batch.seq_id[i][0] = 0
        self.scores = {}
        status = ll.llama_decode(self._context, batch)
        ll.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        self._fed += len(ids)
        rows = [np.ctypeslib.as_array(ll.llama_get_logits_ith(self._context, i), (self._vocab_size,)).copy() for i in range(len(ids))]
        return np.stack(rows)

    def close(self) -> None:
        ll.llama_free(self._context)


def along(path: Path, prompt: Sequence[int], forced: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(logits of the prompt [P, vocab], logits [STEPS, vocab], tokens) of the greedy continuation, or of `forced`."""
    oracle = Oracle(path)
    run = Run(oracle, len(prompt) + STEPS)
    whole = run.feed(prompt)
    rows, tokens = [whole[-1]], []
    for i in range(STEPS):
        tokens.append(int(rows[-1].argmax() if forced is None else forced[i]))
        if i + 1 < STEPS:
            rows.append(run.feed(tokens[-1:])[0])
    run.close()
    oracle.close()
    return whole, np.stack(rows), tokens


def routes(path: Path, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """(experts chosen i16 [T, layers, top_k], margins f32 [T, layers]) of tokens decoded together; None without experts."""
    with open_model(path) as model:
        keys = Keys(model)
        num_experts = keys.integer("expert_count", 0)
        top_k = keys.per_layer("expert_used_count", keys.integer("block_count"), 0)
    if not num_experts:
        return None
    oracle = Oracle(path)
    run = Run(oracle, len(ids), watches=True)
    run.feed(ids)
    layers: dict[int, np.ndarray] = {}
    for kind in SCORES:
        for name, values in run.scores.items():
            head, _, il = name.rpartition("-")
            if head == kind and values.size == len(ids) * num_experts:
                layers[int(il)] = values.reshape(len(ids), num_experts)
    run.close()
    oracle.close()
    chosen, margins = [], []
    for il, scores in sorted(layers.items()):
        order = np.argsort(-scores, axis=1, kind="stable")
        ranked, k = np.take_along_axis(scores, order, 1), top_k[il]
        chosen.append(np.pad(np.sort(order[:, :k], axis=1), ((0, 0), (0, max(top_k) - k)), constant_values=-1))
        margins.append(ranked[:, k - 1] - ranked[:, k] if k < num_experts else np.full(len(ids), np.inf))
    return np.stack(chosen, 1).astype(np.int16), np.stack(margins, 1).astype(np.float32)


def recording(path: Path, prompt: list[int], folder: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of one case, and what makes it a poor judge."""
    whole, rows, tokens = along(path, prompt)
    ids = [*prompt, *tokens[:-1]]
    arrays = {"prompt": np.array(prompt, np.int32), "generated": np.array(tokens, np.int32), "logits": rows}
    best = np.sort(rows, 1)
    meta: dict[str, Any] = {
        "oracle": f"llama-cpp-python {llama_cpp.__version__}, {ll.llama_print_system_info().decode().strip()}",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "settings": "cpu, 1 thread, KV F32, no flash attention, no repack",
        "top_gap": round(float((best[:, -1] - best[:, -2]).min()), 5),
    }
    against = [("the greedy choice is unclear", meta["top_gap"] < 0.02), ("hardly a token differs", len(set(tokens)) < 4)]
    routed = routes(path, ids)
    if routed:
        arrays["experts"], arrays["margin"] = routed
        meta["router_margin"] = round(float(routed[1].min()), 6)
        against.append(("the choice of experts is unclear", meta["router_margin"] < 5e-5))
    with open_model(path) as model:
        floats = {info.encoding.name for info in model.tensors.values()} <= {"F32", "I32"}
    if floats:
        if len(prompt) <= LONG:
            arrays["prompt_logits"] = whole
    else:
        exact = folder / "exact.gguf"
        decoded_copy(path, exact)
        arrays["exact"] = along(exact, prompt, tokens)[1]
        meta["exact_diff"] = round(float(np.abs(arrays["exact"] - rows).max() / np.abs(rows).max()), 6)
        meta["exact_greedy_same"] = bool((arrays["exact"].argmax(1) == arrays["generated"]).all())
        against += [("other tokens with float activations", not meta["exact_greedy_same"]), ("far from float", meta["exact_diff"] > 0.08)]
        if routed:
            arrays["exact_experts"] = routes(exact, ids)[0]  # type: ignore[index]
            meta["experts_differ"] = int((arrays["exact_experts"] != arrays["experts"]).any(2).sum())
            against.append(("other experts with float activations", meta["experts_differ"] > 0))
    arrays["meta"] = np.array(json.dumps(meta))
    return arrays, [text for text, so in against if so]


def enter(model: TinyModel, family: str, size: int, sha256: str) -> str:
    """Add the case to cases.json; its name."""
    name = f"{family}-s{model.seed}-z{size}-{model.dtype}"
    rows = {row["name"]: row for row in json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))}
    rows[name] = {
        "name": name, "family": family, "seed": model.seed, "size": size, "dtype": model.dtype, "used": True,
        "encodings": sorted({by_id(tensor.ggml_id).name for tensor in model.tensors.values()}), "sha256": sha256,
    }  # fmt: skip
    ordered = sorted(rows.values(), key=lambda row: (row["family"], row["size"], row["dtype"], row["seed"]))
    (FOLDER / "cases.json").write_text("[\n" + ",\n".join(map(json.dumps, ordered)) + "\n]\n", encoding="utf-8")
    return name


@ll.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: object) -> None:
    """A status says what matters of the oracle's own log."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a case of the tiny models.")
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("size", type=int, choices=(0, 1))
    parser.add_argument("dtype", help="an encoding's name, or mix")
    parser.add_argument("--seed", type=int, default=1, help="the first seed to try")
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--length", type=int, default=21, help="tokens of the prompt")
    args = parser.parse_args()
    ll.llama_log_set(_quiet, None)
    ll.llama_backend_init()
    best: tuple[int, TinyModel, dict[str, np.ndarray], list[str]] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seed, args.seed + args.tries):
            model = build(args.family, seed, args.size, args.dtype)
            prompt = np.random.default_rng([seed, args.length]).integers(0, 300, args.length).tolist()
            arrays, against = recording(model.write(Path(folder) / "tiny.gguf"), prompt, Path(folder))
            if best is None or len(against) < best[0]:
                best = len(against), model, arrays, against
            if not against:
                break
    if best is None:
        raise SystemExit("--tries must be 1 or more")
    _, model, arrays, against = best
    name = enter(model, args.family, args.size, json.loads(str(arrays["meta"]))["sha256"])
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    print(name, *(f"[{text}]" for text in against))


if __name__ == "__main__":
    main()
