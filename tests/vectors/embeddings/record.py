"""Records what llama.cpp embeds with the tiny models of tests/tiny_models/embedding_families.py: the vectors beside this file.

Owns the texts, the list of cases and the recordings' format. Must not know the engine beyond the reading of files. Needs llama.cpp's
libraries and its Python binding, as benchmarks/record_oracle.py does and says:

    LLAMA_CPP_LIB_PATH=build/bin LD_LIBRARY_PATH=build/bin PYTHONPATH=.:engine:tests:llama_cpp_python-0.3.36 \\
        python tests/vectors/embeddings/record.py
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.record_oracle import Oracle, decoded_copy, ll
from tiny_models.container import file_bytes
from tiny_models.embedding_families import EMBEDDERS, build

FOLDER = Path(__file__).parent
TEXTS = (
    "hello world",
    "a",
    "",
    "The keeper of the tower, in winter: he is lighting the light!",
    "Über den Élysée-Wäldern flog ein Bär; 中文 and 日本語, x+y=10 (50%).",
    "    spaces\tand\nlines   ",
    "[SEP] <s> </s> <|im_end|> <mask>",
    " ".join(f"{i} boats, the sea and {'light' * (i % 3)} winter{'ly' * (i % 2)}." for i in range(14)),
)
CASES = [(family, 1, size, "F32") for family in EMBEDDERS for size in (0, 1)] + [(family, 2, 0, "mix") for family in EMBEDDERS]


def ids_of(oracle: Oracle, text: str) -> list[int]:
    raw = text.encode()
    ids = (ctypes.c_int32 * (2 * len(raw) + 16))()
    return list(ids[: ll.llama_tokenize(oracle.vocab, raw, len(raw), ids, len(ids), True, True)])


def pooled(oracle: Oracle, ids: list[int]) -> np.ndarray:
    """The vector of a text as llama.cpp pools it, of whatever length: a context of its own, one thread, no flash attention."""
    params = ll.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_seq_max = params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    params.type_k = params.type_v = 0
    params.offload_kqv = False
    params.embeddings = True
    context = ll.llama_init_from_model(oracle.model, params)
    if not context:
        raise RuntimeError("llama.cpp made no context")
    tokens = (ctypes.c_int32 * len(ids))(*ids)  # the batch points to it
    status = ll.llama_decode(context, ll.llama_batch_get_one(tokens, len(ids)))
    if status:
        raise RuntimeError(f"llama_decode: {status}")
    dim = ll.llama_model_n_embd(oracle.model)
    values = np.ctypeslib.as_array(ll.llama_get_embeddings_seq(context, 0), (dim,)).copy()
    ll.llama_free(context)
    return values


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family, seed, size, dtype in CASES:
            name = f"{family}-s{seed}-z{size}-{dtype}"
            model = build(family, seed, size, dtype)
            path = model.write(Path(folder) / f"{name}.gguf")
            rows.append({"name": name, "family": family, "seed": seed, "size": size, "dtype": dtype,
                         "sha256": hashlib.sha256(file_bytes(model.kvs, model.tensors)).hexdigest()})  # fmt: skip
            oracle = Oracle(path)
            ids = [ids_of(oracle, text) for text in TEXTS]
            have = [one for one in ids if one]
            arrays = {"ids": np.array([i for one in ids for i in one], np.int32), "lengths": np.array([len(one) for one in ids], np.int32),
                      "values": np.stack([pooled(oracle, one) for one in have])}  # fmt: skip
            oracle.close()
            if dtype != "F32":
                exact = Path(folder) / f"{name}-exact.gguf"
                decoded_copy(path, exact)
                oracle = Oracle(exact)
                arrays["exact"] = np.stack([pooled(oracle, one) for one in have])
                oracle.close()
            np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
            print(name, arrays["lengths"].tolist(), arrays["values"].std())
    (FOLDER / "cases.json").write_text(json.dumps({"texts": TEXTS, "cases": rows}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
