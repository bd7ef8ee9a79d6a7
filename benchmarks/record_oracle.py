"""Records what llama.cpp computes for the demo's models: the reference that `tests/models` holds the engine against.

Owns the oracle's lanes and the recordings' format. Must not know the engine. The base lane runs on one thread with an F32 KV cache and
no flash attention. The others say how far the oracle is from itself when nothing that matters changes (KV in F16, two threads, flash
attention, the prompt fed token by token), and, as `exact`, what the same weights give when they are decoded to F32, so that activations
are not rounded to int8. An engine that stands no further from the base than `exact` does is as right as the oracle.

Needs llama.cpp's libraries and its Python binding (the sdist `llama-cpp-python`; its sources serve unbuilt), and tells so if they lack:

    LLAMA_CPP_LIB_PATH=build/bin LD_LIBRARY_PATH=build/bin PYTHONPATH=engine:llama_cpp_python-0.3.36 \\
        python -m benchmarks.record_oracle tests/vectors/smollm2

A recording is one .npz for each model and prompt; tests/vectors/smollm2/README.md describes it.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from benchmarks import fetch_smollm2
from benchmarks.gguf_out import Plan, key_values, write
from vllm_cpp.gguf_file import GGUFModel, open_model

try:
    import llama_cpp
    from llama_cpp import llama_cpp as ll
except ImportError as error:
    raise SystemExit(f"{error}: recording needs the Python binding of llama.cpp, see the top of {__file__}") from None

STEPS = 32
TOP = 64  # ids recorded of each row: the best ones, and as many spread over the vocabulary
F16, F32 = 1, 0
F32_ID = 0
PASSAGE = """\
The lighthouse stood at the end of a long stone pier, and every evening at dusk the keeper walked out to light the lamp. He had done so for
thirty-one years, in calm weather and in storms, and he knew each of the four hundred and twelve steps of the tower by its sound. In the
spring the fishing boats left before sunrise, and he could tell them apart by their engines alone. In the autumn the geese came over in long
lines, and he wrote the day of the first ones in a book which the keeper before him had begun. Nobody had ever asked to see the book. \
It lay on
the shelf beside the barometer, the spare wicks and a tin of biscuits.

One night in October a letter came with the supply boat. It said that the lamp would be changed for an electric one, that a clock would
switch it on and off, and that the keeper would not be needed any more. He read the letter twice, folded it and put it into the book, \
between
the geese of that year and the geese of the year before. Then he took his coat from the hook, because it was almost dusk, and went"""
PROMPTS = {
    "capital": "The capital of France is",
    "chat": "<|im_start|>user\nWhy is the sky blue? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "days": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    "numbers": "1, 2, 3, 4, 5, 6, 7,",
    "umlauts": "Die Hauptstadt von Österreich heißt Wien. Die Hauptstadt von Dänemark heißt",
    "passage": PASSAGE,
}
FULL_ROWS = ("capital", "passage")  # prompts whose first row is recorded for the whole vocabulary


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to run the oracle."""

    name: str
    threads: int = 1
    kv_type: int = F32
    flash: bool = False
    batch: int = 0  # tokens of the prompt fed at once; 0: all


BASE = Lane("base")
NOISE = (Lane("kv_f16", kv_type=F16), Lane("two_threads", threads=2), Lane("flash", kv_type=F16, flash=True), Lane("one_by_one", batch=1))


class Oracle:
    """A model in llama.cpp on the CPU, weights not repacked; a context for each run."""

    def __init__(self, path: Path) -> None:
        params = ll.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        self.model = ll.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp refused {path}")
        self.vocab = ll.llama_model_get_vocab(self.model)
        self.vocab_size = ll.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 8))()
        return list(ids[: ll.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), True, True)])

    def rows(self, lane: Lane, prompt: Sequence[int], steps: int, forced: Sequence[int] | None = None) -> np.ndarray:
        """Logits [steps, vocab]: row 0 after the prompt, row i after feeding token i - 1 of the greedy continuation, or of `forced`."""
        params = ll.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = -(-(len(prompt) + steps) // 256) * 256
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = lane.threads
        params.flash_attn_type = int(lane.flash)
        params.type_k = params.type_v = lane.kv_type
        params.offload_kqv = False
        context = ll.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp made no context for lane {lane.name}")
        chunk = lane.batch or len(prompt)
        for start in range(0, len(prompt), chunk):
            row = self._feed(context, prompt[start : start + chunk])
        out = [row]
        while len(out) < steps:
            token = int(row.argmax()) if forced is None else int(forced[len(out) - 1])
            row = self._feed(context, [token])
            out.append(row)
        ll.llama_free(context)
        return np.stack(out)

    def _feed(self, context: object, ids: Sequence[int]) -> np.ndarray:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        status = ll.llama_decode(context, ll.llama_batch_get_one(tokens, len(ids)))
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(context, -1), (self.vocab_size,)).copy()

    def close(self) -> None:
        ll.llama_model_free(self.model)


def decoded_copy(source: Path, out: Path) -> None:
    """`source` with every weight decoded to F32; tables of integers stay what they are."""
    with open_model(source) as model:
        plans = [
            Plan(name, info.shape, info.encoding.ggml_id, info.n_bytes, lambda name=name: iter([model.bytes_of(name)]))
            if info.encoding.name.startswith("I") and not info.encoding.name.startswith("IQ")
            else Plan(name, info.shape, F32_ID, 4 * int(np.prod(info.shape)), lambda name=name: _decoded(model, name))
            for name, info in model.tensors.items()
        ]
        write(out, key_values(model), plans)


def _decoded(model: GGUFModel, name: str) -> Iterator[np.ndarray]:
    info = model.tensors[name]
    for part in model.bytes_of(name).reshape(-1, info.row_bytes):
        yield dequantize(part, GGMLQuantizationType(info.encoding.ggml_id)).astype("<f4")


def recording(prompt: Sequence[int], lanes: dict[str, np.ndarray], full: bool, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of one .npz from each lane's logits [steps, vocab]."""
    base = lanes["base"]
    generated = base.argmax(1)
    ids = np.stack([np.argsort(-row, kind="stable")[:TOP] for row in base])
    spread = np.linspace(0, base.shape[1] - 1, TOP).astype(int)
    ids = np.concatenate([ids, np.broadcast_to(spread, ids.shape)], 1)
    at_ids = {lane: np.take_along_axis(rows, ids, 1) for lane, rows in lanes.items()}
    margins = {lane: rows[:, 0] - rows[:, 1] for lane, rows in at_ids.items()}  # of the base's best two, in each lane
    for lane, rows in at_ids.items():
        apart = rows - at_ids["base"]
        meta[lane] = {
            "rms": round(float(np.sqrt((apart**2).mean())), 5),
            "largest": round(float(np.abs(apart).max()), 5),
            "margin_moved": round(float(np.abs(margins[lane] - margins["base"]).max()), 5),
            "same_choice": int((lanes[lane].argmax(1) == generated).sum()),
            "first_row": round(float((lanes[lane][0] - base[0]).std()), 5),
        }
    arrays = {
        "prompt": np.array(prompt, np.int32),
        "generated": generated.astype(np.int32),
        "margin": margins["base"],
        "ids": ids.astype(np.uint16),
        "logits": at_ids["base"],
        "exact": at_ids["exact"],
        "meta": np.array(json.dumps(meta)),
    }
    if full:
        arrays["full_row"] = base[0].astype(np.float16)
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description="Record llama.cpp's logits for the demo's models.")
    parser.add_argument("out", type=Path, help="folder for the recordings")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    ll.llama_log_set(_quiet, None)
    ll.llama_backend_init()
    origin = f"llama-cpp-python {llama_cpp.__version__}, {ll.llama_print_system_info().decode().strip()}"
    models = {"dense": Oracle(fetch_smollm2.dense()), "moe": Oracle(fetch_smollm2.moe())}
    sums = {"dense": _sha256(fetch_smollm2.dense()), "moe": _sha256(fetch_smollm2.moe())}
    with tempfile.TemporaryDirectory() as folder:
        decoded_copy(fetch_smollm2.dense(), Path(folder) / "exact.gguf")
        exact = Oracle(Path(folder) / "exact.gguf")
        for name, text in PROMPTS.items():
            for kind, oracle in models.items():
                start = time.monotonic()
                prompt = oracle.tokenize(text)
                lanes = {"base": oracle.rows(BASE, prompt, STEPS)}
                tokens = lanes["base"].argmax(1)
                lanes |= {lane.name: oracle.rows(lane, prompt, STEPS, tokens) for lane in NOISE}
                # With float activations every expert computes the dense block, so the decoded dense model is exact for both.
                lanes["exact"] = exact.rows(BASE, prompt, STEPS, tokens)
                meta: dict[str, Any] = {"model_sha256": sums[kind], "text": text, "oracle": origin}
                arrays = recording(prompt, lanes, name in FULL_ROWS, meta)
                np.savez_compressed(out / f"{kind}-{name}.npz", **arrays)
                print(kind, name, f"{time.monotonic() - start:.0f} s:", ", ".join(meta["exact"]), flush=True)
                print("   ", " ".join(f"{lane}={list(meta[lane].values())}" for lane in lanes), flush=True)
        exact.close()
    for oracle in models.values():
        oracle.close()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@ll.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: object) -> None:
    """The oracle's own log says nothing that a status does not."""


if __name__ == "__main__":
    main()
