"""One short file per family: which layers an architecture has, in the order they are computed. Importing this package registers them
all."""

from vllm_cpp.models.families import deepseek2, llama, olmoe, qwen2, qwen3  # noqa: F401
