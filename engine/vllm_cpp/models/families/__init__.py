"""One short file per family: which layers an architecture has, in the order they are computed. Importing this package registers them
all."""

from vllm_cpp.models.families import (  # noqa: F401
    deepseek2,
    gpt_oss,
    granitehybrid,
    jamba,
    laguna,
    lfm2moe,
    llama,
    mistral3,
    nemotron_h,
    olmoe,
    qwen2,
    qwen3,
)
