"""Do the vocabulary's arrays belong together?

Owns the checks that need no tokenizer: one kind, one score and one text a token, and special ids that lie inside. Must not know how text
becomes tokens. Duplicate and empty texts pass: real vocabularies have them.
"""

from __future__ import annotations

from vllm_cpp.gguf_file.model import TOKENS_KEY, GGUFModel

PER_TOKEN = (("tokenizer.ggml.scores", "f32"), ("tokenizer.ggml.token_type", "int"))
# Only the ids the engine acts on. Real files carry padding ids of nowhere, and llama.cpp loads them.
SPECIAL_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom"))


def check_vocabulary(model: GGUFModel) -> int:
    """The number of tokens, after checking that everything said about them agrees with it."""
    kv = model.kv
    entry = kv.entry(TOKENS_KEY)
    if entry is None:
        raise kv.error(TOKENS_KEY, "missing; this model needs its vocabulary")
    if entry.kind != "array of str" or entry.count == 0:
        raise kv.error(TOKENS_KEY, f"is {entry.kind} of length {entry.count}, expected an array of str, not empty")
    for key, kind in PER_TOKEN:
        values = kv.get_array(key, kind, None)
        if values is not None and len(values) != entry.count:
            raise kv.error(key, f"has {len(values)} elements, but there are {entry.count} tokens")
    for key in SPECIAL_IDS:
        token_id = kv.get_u32(key, None)
        if token_id is not None and token_id >= entry.count:
            raise kv.error(key, f"is {token_id}, but there are {entry.count} tokens")
    return entry.count
