"""GGUF files: a header walk over a read-only mapping, split sets, key/values, hyper-parameters.

Owns everything between a path and a checked table of tensors: bounds first, then belief. A file is untrusted input, so every count is
held against the bytes that remain before anything is allocated or looped over, and every refusal is a ModelLoadError that names the
key or tensor and the byte offset. Must not know what a tensor is used for, nor touch tensor data: weights are only pointed at.
"""

from vllm_cpp.gguf_file.model import GGUFModel, TensorInfo, open_model

__all__ = ["GGUFModel", "TensorInfo", "open_model"]
