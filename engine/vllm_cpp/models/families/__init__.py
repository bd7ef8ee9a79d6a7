"""One short file per family: which layers an architecture has, in the order they are computed. Importing this package registers them
all."""

from vllm_cpp.models.families import (  # noqa: F401
    bailingmoe2,
    bailingmoe3,
    bert,
    deepseek2,
    deepseek4,
    dots1,
    ernie4_5_moe,
    gemma4,
    glm4moe,
    gpt_oss,
    granitehybrid,
    granitemoe,
    jamba,
    kimi_linear,
    laguna,
    lfm2moe,
    llama,
    minimax_m2,
    mistral3,
    nemotron_h,
    olmoe,
    qwen2,
    qwen3,
    qwen35,
)
