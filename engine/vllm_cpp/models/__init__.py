"""Models: from an opened file to something that turns chunks of tokens into logits.

Owns the table of families and the sizes an engine's parameters leave open (context, KV blocks, pieces of a step). Must not know requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from vllm_cpp import log
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.offload import Residency
from vllm_cpp.errors import InvalidArgumentError, ModelLoadError
from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.gguf_file.hparams import HyperParameters, read_hyper_parameters, without_drafts
from vllm_cpp.kernels.cpu.kv_cache import KvLayout
from vllm_cpp.models import states
from vllm_cpp.models.builder import Builder, StepArrays
from vllm_cpp.models.pooling import read_pooling
from vllm_cpp.models.registry import Family, find, supported
from vllm_cpp.models.runner import Runner
from vllm_cpp.residency.borrow import Weights
from vllm_cpp.residency.expand import ExpandedWeights
from vllm_cpp.residency.streaming import open_stream

__all__ = ["Runner", "find", "kv_cache_bytes", "load", "state_bytes", "supported"]

DEFAULT_NUM_BLOCKS = 256
# Tokens computed together. A longer step is run in pieces of this many: larger pieces gain nothing once weights are reused this often, and
# their activations would leave the second cache level.
PIECE_TOKENS = 512


def load(
    model: GGUFModel,
    params: EngineParams,
    residency: Residency,
    progress: Callable[[str, float], None] | None = None,
) -> Runner:
    """Build the runner of an opened model. ModelLoadError naming the architecture, key, tensor or encoding that stands in the way."""
    family = find(model.architecture)
    hp = read_hyper_parameters(model)
    model = without_drafts(model)
    pooling = read_pooling(model, family)
    layouts = _kv_layouts(model, params, residency, family, hp)
    num_blocks, max_model_len = _sizes(params, hp, sum(layout.block_bytes for layout in layouts if layout), family.state_grows)
    blocks_a_sequence = -(-max_model_len // params.block_size)
    whole_texts = pooling is not None and not pooling.causal
    step = StepArrays(max(PIECE_TOKENS, params.max_num_seqs, max_model_len if whole_texts else 0), params.max_num_seqs, blocks_a_sequence)
    with contextlib.ExitStack() as undo:
        stream = open_stream(model, residency, streams_experts=family.streams_experts)
        if stream is not None:
            undo.callback(stream.close)
        if residency.expand:
            weights: Weights = ExpandedWeights(model, residency)
            model = weights.model
        else:
            weights = Weights(model, residency, streamed=frozenset() if stream is None else stream.names)
        undo.callback(weights.close)
        builder = Builder(
            model,
            weights.address,
            step,
            num_threads=params.num_threads,
            out_width=hp.embedding_length if pooling else hp.vocab_size,
            block_size=params.block_size,
            kv_layouts=layouts,
            num_kv_blocks=num_blocks,
            stream=stream,
            advises=weights.exceed_memory,
            pooling=pooling,
        )
        family.describe(builder, hp)
        _warn_of_unread(model)
        weights.prefault(progress)
        runner = Runner(builder, weights, vocab_size=hp.vocab_size, max_model_len=max_model_len, is_moe=hp.num_experts > 0)
        undo.pop_all()  # the runner closes them
    return runner


def _warn_of_unread(model: GGUFModel) -> None:
    """Say which tensors the family did not ask for: a bias, say, of a kind that it does not have. The scale of an activation means nothing
    where activations are float, and of two sets of rope factors one is not needed."""
    known = (".input_scale", "rope_factors_long.weight", "rope_factors_short.weight")
    unread = [name for name in model.tensors if name not in model.asked_for and not name.endswith(known)]
    if unread:
        names = ", ".join(unread[:3]) + ", …" * (len(unread) > 3)
        log.once(
            f"unread {model.path}",
            f"vllm: warning: {model.path}: {model.architecture} does not read {len(unread)} of its {len(model.tensors)} tensors ({names}); "
            "if the model was made with them, its answers are not what they should be",
        )


def kv_cache_bytes(model: GGUFModel, params: EngineParams, residency: Residency) -> int:
    """Bytes of the KV cache that `load` would set up for an opened model; ModelLoadError where it would raise one for the sizes."""
    family = find(model.architecture)
    hp = read_hyper_parameters(model)
    layouts = _kv_layouts(model, params, residency, family, hp)
    block_bytes = sum(layout.block_bytes for layout in layouts if layout)
    return _sizes(params, hp, block_bytes, family.state_grows)[0] * block_bytes


def state_bytes(model: GGUFModel, params: EngineParams, residency: Residency) -> int:
    """Bytes of what running sequences keep beside the KV cache in the engine that `load` would set up; errors as `load` has them."""
    family, hp = find(model.architecture), read_hyper_parameters(model)
    model = without_drafts(model)
    layouts, pooling = _kv_layouts(model, params, residency, family, hp), read_pooling(model, family)
    longest = _sizes(params, hp, sum(layout.block_bytes for layout in layouts if layout), family.state_grows)[1]
    step = StepArrays(1, params.max_num_seqs, -(-longest // params.block_size))
    out_width = hp.embedding_length if pooling else hp.vocab_size
    return states.state_bytes(model, params, family, hp, step=step, out_width=out_width, kv_layouts=layouts, pooling=pooling)


def _kv_layouts(model: GGUFModel, params: EngineParams, residency: Residency, family: Family, hp: HyperParameters) -> list[KvLayout | None]:
    """How each layer's keys and values lie in a block; None for a layer that keeps none."""
    pooling = read_pooling(model, family)
    if pooling is not None and not pooling.causal:
        return [None] * hp.num_layers  # a text is computed as a whole
    kv_dtype = "f32" if residency.reference else params.kv_cache_dtype
    return [
        KvLayout(shape.num_kv_heads, shape.key_length, params.block_size, kv_dtype, shape.value_length) if shape else None
        for shape in family.kv_shapes(model, hp)
    ]


def _sizes(params: EngineParams, hp: HyperParameters, block_bytes: int, state_grows: bool) -> tuple[int, int]:
    """(KV blocks, longest sequence), from what the parameters say and leave open.

    Blocks: num_blocks, else what kv_cache_memory_bytes pays for, else 256 or as many as an explicit max_model_len needs. The longest
    sequence: max_model_len, else the model's context, cut to what the blocks hold.
    """
    if block_bytes == 0:
        return _sizes_without_cache(params, hp, state_grows)
    num_blocks, kv_bytes = params.num_blocks, params.kv_cache_memory_bytes
    if kv_bytes is not None:
        paid = kv_bytes // block_bytes
        if paid == 0:
            raise InvalidArgumentError(
                f"kv_cache_memory_bytes is {kv_bytes}, but one KV block of {params.block_size} tokens takes {block_bytes} bytes here"
            )
        if num_blocks not in (0, paid):
            log.line(
                f"engine: num_blocks={num_blocks} sets the size of the KV cache ({num_blocks * block_bytes} bytes); "
                f"kv_cache_memory_bytes={kv_bytes}, which would pay for {paid} blocks, is not used"
            )
        num_blocks = num_blocks or paid
    _refuse_longer_than_trained(params, hp)
    if not num_blocks:
        num_blocks = max(DEFAULT_NUM_BLOCKS, -(-params.max_model_len // params.block_size))
    capacity = num_blocks * params.block_size
    if params.max_model_len > capacity:
        raise ModelLoadError(
            f"max_model_len is {params.max_model_len}, but {num_blocks} KV blocks of {params.block_size} tokens hold {capacity}: "
            "raise num_blocks or kv_cache_memory_bytes"
        )
    return num_blocks, params.max_model_len or min(hp.context_length, capacity)


def _sizes_without_cache(params: EngineParams, hp: HyperParameters, state_grows: bool) -> tuple[int, int]:
    """The same for a model that keeps no keys and values: as many blocks, which then take no memory, as never to run out. Where what it
    keeps instead has room for the longest sequence, that is as long as the usual number of blocks, unless max_model_len says otherwise."""
    for name in ("num_blocks", "kv_cache_memory_bytes"):
        if getattr(params, name):
            log.line(f"engine: {name}={getattr(params, name)} has no effect: this model keeps no keys and values")
    _refuse_longer_than_trained(params, hp)
    longest = min(hp.context_length, DEFAULT_NUM_BLOCKS * params.block_size) if state_grows else hp.context_length
    max_model_len = params.max_model_len or longest
    return params.max_num_seqs * (-(-max_model_len // params.block_size) + 1), max_model_len


def _refuse_longer_than_trained(params: EngineParams, hp: HyperParameters) -> None:
    if params.max_model_len > hp.context_length:
        raise ModelLoadError(
            f"max_model_len is {params.max_model_len}, but the model was trained for {hp.context_length} tokens (context_length)"
        )
