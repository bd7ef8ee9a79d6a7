"""Block layouts of every GGUF encoding: how many values and bytes a quant block has, and which activation form its kernels take.

Owns the one table of encodings. Must not know files, kernels or devices: it imports nothing but errors, so the file reader below
and the kernels above can both lean on it. What a block's bytes *mean* is written down twice elsewhere: in the kernels, and naively
in tests/reference/decoders.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_cpp.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Encoding:
    """One ggml type. `activation` names the form a kernel wants its input in: "f32" plain floats, "bf16" those rounded to bf16, "a32" int8
    blocks of 32, "q8k" int8 blocks of 256, "none" for types that are never multiplied with (integers, and ggml's own activation forms)."""

    name: str
    ggml_id: int
    block_values: int
    block_bytes: int
    activation: str

    def row_bytes(self, cols: int) -> int:
        """Bytes of one row of `cols` values; `cols` must fill whole blocks."""
        blocks, rest = divmod(cols, self.block_values)
        if rest:
            raise ValueError(f"{cols} values do not fill {self.name} blocks of {self.block_values}")
        return blocks * self.block_bytes


_ROWS = (
    Encoding("F32", 0, 1, 4, "f32"),
    Encoding("F16", 1, 1, 2, "f32"),
    Encoding("Q4_0", 2, 32, 18, "a32"),
    Encoding("Q4_1", 3, 32, 20, "a32"),
    Encoding("Q5_0", 6, 32, 22, "a32"),
    Encoding("Q5_1", 7, 32, 24, "a32"),
    Encoding("Q8_0", 8, 32, 34, "a32"),
    Encoding("Q8_1", 9, 32, 36, "none"),
    Encoding("Q2_K", 10, 256, 84, "q8k"),
    Encoding("Q3_K", 11, 256, 110, "q8k"),
    Encoding("Q4_K", 12, 256, 144, "q8k"),
    Encoding("Q5_K", 13, 256, 176, "q8k"),
    Encoding("Q6_K", 14, 256, 210, "q8k"),
    Encoding("Q8_K", 15, 256, 292, "none"),
    Encoding("IQ2_XXS", 16, 256, 66, "q8k"),
    Encoding("IQ2_XS", 17, 256, 74, "q8k"),
    Encoding("IQ3_XXS", 18, 256, 98, "q8k"),
    Encoding("IQ1_S", 19, 256, 50, "q8k"),
    Encoding("IQ4_NL", 20, 32, 18, "a32"),
    Encoding("IQ3_S", 21, 256, 110, "q8k"),
    Encoding("IQ2_S", 22, 256, 82, "q8k"),
    Encoding("IQ4_XS", 23, 256, 136, "q8k"),
    Encoding("I8", 24, 1, 1, "none"),
    Encoding("I16", 25, 1, 2, "none"),
    Encoding("I32", 26, 1, 4, "none"),
    Encoding("I64", 27, 1, 8, "none"),
    Encoding("F64", 28, 1, 8, "f32"),
    Encoding("IQ1_M", 29, 256, 56, "q8k"),
    Encoding("BF16", 30, 1, 2, "bf16"),
    Encoding("TQ1_0", 34, 256, 54, "q8k"),
    Encoding("TQ2_0", 35, 256, 66, "q8k"),
    Encoding("MXFP4", 39, 32, 17, "a32"),
    Encoding("NVFP4", 40, 64, 36, "a32"),
    Encoding("Q1_0", 41, 128, 18, "a32"),
    Encoding("Q2_0", 42, 64, 18, "a32"),
)

ENCODINGS: dict[str, Encoding] = {row.name: row for row in _ROWS}
_BY_ID = {row.ggml_id: row for row in _ROWS}

# Ids that ggml once gave out and took back. Files with them exist, and their users deserve a better text than "unknown".
REMOVED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


def by_id(ggml_id: int) -> Encoding:
    """The encoding of a ggml type id; a ModelLoadError saying why where there is none."""
    row = _BY_ID.get(ggml_id)
    if row is not None:
        return row
    if ggml_id in REMOVED:
        raise ModelLoadError(f"encoding {REMOVED[ggml_id]} (ggml type {ggml_id}) was removed from the format: quantize the model again")
    raise ModelLoadError(f"ggml type {ggml_id} is unknown; this version knows 0 to {max(_BY_ID)}: a newer library may read it")
