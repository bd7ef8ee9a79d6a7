"""How much memory running sequences keep beside the KV cache: the states of recurrent layers, of compressed attention, of pooling.

Owns the answer, which a family gives by describing its layers to a builder that writes down what they ask for. Must not know any layer:
what an engine would set aside and what is told here cannot differ. No kernel of a weight is compiled for it.
"""

from __future__ import annotations

from typing import Any

from vllm_cpp.config.engine import EngineParams
from vllm_cpp.gguf_file import GGUFModel, TensorInfo
from vllm_cpp.gguf_file.hparams import HyperParameters
from vllm_cpp.kernels.cpu.registry import EncodingKernels
from vllm_cpp.models.builder import Builder, State, Weight, state_stride
from vllm_cpp.models.registry import Family

_NO_KERNELS = EncodingKernels(0, 0, 0)


class _Asked(Builder):
    """A builder whose program cannot run: it adds up what is asked for, and sets none of it aside."""

    n_bytes = 0

    def state(self, num_values: int) -> State:
        stride = state_stride(num_values)
        self.n_bytes += self.step.max_seqs * stride
        return State(0, stride)

    def _weight(self, info: TensorInfo) -> Weight:
        return self.weight_of(info, _NO_KERNELS)


def state_bytes(model: GGUFModel, params: EngineParams, family: Family, hp: HyperParameters, **built: Any) -> int:
    """Bytes for as many sequences as may run at once. `built`: what else a builder of this model is given."""
    asked = _Asked(model, lambda info: info.address, num_threads=1, block_size=params.block_size, num_kv_blocks=1, **built)
    family.describe(asked, hp)
    return asked.n_bytes
