"""Which encodings have kernels, and where those are.

Owns the look-up by name. Importing this imports no kernel; asking for an encoding imports its file and compiles its three kernels (or
loads them from the disk cache), so a model pays only for the encodings its file holds. Must not know block layouts.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from vllm_cpp.errors import ModelLoadError

NAMES = (
    "F64", "F32", "F16", "BF16",
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncodingKernels:
    """Addresses of an encoding's compiled kernels; see `jit.row_kernel`, `jit.tile_kernel` and `jit.decode_kernel` for their arguments."""

    rows_address: int
    tile_address: int
    decode_address: int


@cache
def encoding_kernels(name: str) -> EncodingKernels:
    """The kernels of the encoding called `name` in GGUF (`Q4_K`)."""
    module = _module(name)
    return EncodingKernels(module.rows.address, module.tile.address, module.decode.address)


def decode_address(name: str) -> int:
    """The decode kernel of an encoding alone."""
    return _module(name).decode.address


def _module(name: str) -> ModuleType:
    if name not in NAMES:
        raise ModelLoadError(
            f"encoding {name} has no CPU kernels; there are kernels for {', '.join(NAMES)}: quantize the model to one of these"
        )
    return importlib.import_module(f"vllm_cpp.kernels.cpu.encodings.{name.lower()}")


def tile_scratch_bytes(k: int) -> int:
    """Bytes of scratch that any encoding's tile kernel needs for rows of k values."""
    from vllm_cpp.kernels.cpu.encodings import a32, q8k

    return max(a32.scratch_bytes(k), q8k.scratch_bytes(k))
