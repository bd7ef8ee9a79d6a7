"""Weights made float32 while loading: the reference lane (VT_CPU_REF=1), and files whose quant blocks shall not be kept
(VT_GGUF_KEEP_QUANT=0).

Owns: which tensors are expanded, the memory that takes and the refusal where it is not there, and the decoding. Must not know what computes
with them: who reads a model through its `ExpandedWeights` finds float32 matrices where the file has something else.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np

from vllm_cpp import log
from vllm_cpp.config.offload import Residency
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.model import GGUFModel, TensorInfo
from vllm_cpp.kernels.cpu.embedding import decode_rows
from vllm_cpp.kernels.cpu.registry import decode_address
from vllm_cpp.quants import ENCODINGS
from vllm_cpp.residency.borrow import Weights
from vllm_cpp.residency.device_fit import gib
from vllm_cpp.residency.memory import available_bytes, take


class ExpandedWeights(Weights):
    """Weights of one model of which some are expanded when they are first asked for. `model` is the file as it then looks."""

    def __init__(self, model: GGUFModel, residency: Residency) -> None:
        super().__init__(model, residency)
        self._sources = {name: info for name, info in model.tensors.items() if _is_expanded(info, residency)}
        self.model = copy.copy(model)  # of the table of tensors; files and key/values are shared
        self.model.tensors = {name: _as_float32(info) if name in self._sources else info for name, info in model.tensors.items()}
        needed, room = sum(self.model.tensors[name].n_bytes for name in self._sources), available_bytes()
        if room is not None and needed > room:
            raise ModelLoadError(
                f"{model.path}: expanded to float32 ({residency.expand}) its weights take {gib(needed)}, but {gib(room)} of memory are "
                "available; unset the variable, or load a smaller model"
            )
        text = f"engine: {residency.expand}: {len(self._sources)} weights are expanded to float32, {gib(needed)}"
        log.once(text, text)

    def address(self, tensor: TensorInfo) -> int:
        source = self._sources.get(tensor.name)
        if source is None or tensor.name in self._addresses:
            return super().address(tensor)
        self._addresses[tensor.name] = self._expand(source, tensor.n_bytes)
        return self._addresses[tensor.name]

    def _expand(self, source: TensorInfo, n_bytes: int) -> int:
        try:
            decode = decode_address(source.encoding.name)
        except ModelLoadError as error:
            raise ModelLoadError(f"tensor '{source.name}': {error}") from None
        memory = self._copies[source.name] = take(n_bytes)
        self.copied_bytes += n_bytes
        to = int(np.frombuffer(memory, np.uint8).ctypes.data)
        decode_rows(decode, source.address, source.row_bytes, source.n_bytes // source.row_bytes, source.shape[-1], to)
        return to


def _is_expanded(info: TensorInfo, residency: Residency) -> bool:
    """Matrices and towers. Vectors are float32 copies in any case."""
    if info.encoding.activation == "none" or len(info.shape) < 2:
        return False
    return info.encoding.name != "F32" if residency.reference else info.encoding.block_values > 1


def _as_float32(info: TensorInfo) -> TensorInfo:
    encoding = ENCODINGS["F32"]
    num_values = info.n_bytes // info.encoding.block_bytes * info.encoding.block_values
    return replace(info, encoding=encoding, n_bytes=encoding.block_bytes * num_values)
