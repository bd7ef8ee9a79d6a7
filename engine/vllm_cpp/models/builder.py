"""Turns what a family says about its layers into operations over buffers.

Owns the activation buffers of a model, which rows stand where, and the choice of operations and barriers. Must not know architectures (a
family calls `rmsnorm`, `matmul`, `attention`, …) nor requests (the runner fills the step arrays).

Every buffer has room for `max_tokens` rows; how many are in use is read from a count cell each step, so a program is built once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import GGUFModel, TensorInfo
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import attention as attention_ops
from vllm_cpp.kernels.cpu import elementwise, embedding, matmul, moe, norm, panel, quantize, rope, router, slots
from vllm_cpp.kernels.cpu.kv_cache import KvLayout
from vllm_cpp.kernels.cpu.registry import EncodingKernels, encoding_kernels, tile_scratch_bytes
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.program import Program
from vllm_cpp.residency.streaming import ExpertStream

Address = int

_MAX_SLOTS = (
    4096  # partial results of attention a step has room for: more sequences with longer contexts fold their chunks one after the other
)


@dataclass(slots=True)
class Rows:
    """A float32 activation buffer [max rows, width], of which the first `count` (an int64 cell) rows are in use.

    `quantized` remembers in which activation layouts the present contents already stand; every writer clears it.
    """

    name: str
    array: np.ndarray
    count: Address
    quantized: dict[str, tuple[Address, int]] = field(default_factory=dict)

    @property
    def address(self) -> Address:
        return self.array.ctypes.data

    @property
    def stride(self) -> int:
        return self.array.strides[0]

    @property
    def width(self) -> int:
        return self.array.shape[1]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix (or tower) in its file encoding: where its first row stands and which kernels read it."""

    name: str
    encoding: str
    layout: str  # the activation layout its kernels want
    address: Address
    n_rows: int
    k: int
    row_bytes: int
    kernels: EncodingKernels
    slice_bytes: int = 0  # towers: bytes between two experts

    def rows(self, first: int, n: int, name: str) -> Weight:
        """Rows first … first + n - 1 as a matrix of their own (a fused projection cut into its parts)."""
        return replace(self, name=name, address=self.address + first * self.row_bytes, n_rows=n)


@dataclass(frozen=True, slots=True)
class Count:
    """A cell the runner sets each step: the number of `source` ("tokens", "sampled" or "seqs") times `factor`."""

    cell: np.ndarray  # int64[1]
    source: str
    factor: int

    @property
    def address(self) -> Address:
        return self.cell.ctypes.data


@dataclass(slots=True)
class StepArrays:
    """What a step is about, at addresses that never change. `max_blocks` KV blocks a sequence."""

    max_tokens: int
    max_seqs: int
    max_blocks: int
    tokens: np.ndarray = field(init=False)  # i32[max_tokens]
    positions: np.ndarray = field(init=False)  # i32[max_tokens]
    seqs: np.ndarray = field(init=False)  # i32[max_tokens]: row of block_tables
    block_tables: np.ndarray = field(init=False)  # i32[max_seqs, max_blocks]
    sampled: np.ndarray = field(init=False)  # i32[max_tokens]: which rows' logits are wanted

    def __post_init__(self) -> None:
        self.tokens = aligned_zeros(self.max_tokens, np.int32)
        self.positions = aligned_zeros(self.max_tokens, np.int32)
        self.seqs = aligned_zeros(self.max_tokens, np.int32)
        self.block_tables = aligned_zeros((self.max_seqs, self.max_blocks), np.int32)
        self.sampled = aligned_zeros(self.max_tokens, np.int32)


class Builder:
    """Collects the operations of one model."""

    def __init__(
        self, model: GGUFModel, address_of: Callable[[TensorInfo], Address], step: StepArrays, *, num_threads: int, vocab_size: int,
        kv_layouts: list[KvLayout], num_kv_blocks: int, stream: ExpertStream | None = None, advises: bool = False,
    ):  # fmt: skip
        """`stream`: where routed experts are streamed. `advises`: ask for chosen slices in the mapping before they are touched."""
        self.model = model
        self.stream = stream
        self.advises = advises
        self.address_of = address_of
        self.step = step
        self.num_threads = num_threads
        self.kv_layouts = kv_layouts
        self.num_kv_blocks = num_kv_blocks
        self.logits = aligned_zeros((step.max_seqs, vocab_size), np.float32)
        self.head_record: np.ndarray | None = None
        self.program = Program()
        self.counts: list[Count] = []
        self._kv_caches: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._keep: list[np.ndarray] = []  # arrays whose addresses stand in records
        self._arrays: dict[str, np.ndarray] = {}
        self._activations: dict[str, np.ndarray] = {}
        self._rows: dict[str, Rows] = {}
        self._scratch_users: list[tuple[np.ndarray, tuple[str, ...]]] = []
        self._scratch_bytes = 0
        self._plan: np.ndarray | None = None
        self._partials: tuple[int, np.ndarray | None] = (0, None)

    # -- memory
    def zeros(self, shape: int | tuple[int, ...], dtype: object) -> np.ndarray:
        array = aligned_zeros(shape, dtype)
        self._keep.append(array)
        return array

    def _kv_cache(self, il: int) -> tuple[np.ndarray, np.ndarray]:
        """The KV blocks of layer `il`: made at first use, when the shapes of tensors have borne out the numbers that size them."""
        if il not in self._kv_caches:
            try:
                self._kv_caches[il] = self.kv_layouts[il].allocate(self.num_kv_blocks)
            except MemoryError as error:
                n_bytes = self.num_kv_blocks * sum(layout.block_bytes for layout in self.kv_layouts)
                raise ModelLoadError(
                    f"{self.model.path}: not enough memory for {self.num_kv_blocks} KV blocks of {self.kv_layouts[il].block_size} tokens, "
                    f"which take {n_bytes} bytes; lower num_blocks, block_size, kv_cache_memory_bytes or max_model_len"
                ) from error
        return self._kv_caches[il]

    def count(self, source: str, factor: int = 1) -> Address:
        """The cell that holds `factor` times this step's "tokens", "sampled" rows or "seqs", as `source` says."""
        for known in self.counts:
            if (known.source, known.factor) == (source, factor):
                return known.address
        fresh = Count(self.zeros(1, np.int64), source, factor)
        self.counts.append(fresh)
        return fresh.address

    def rows(self, name: str, width: int, count: Address, per_token: int = 1) -> Rows:
        """The buffer of that name: [max_tokens * per_token, width]. One name keeps one buffer for the whole model; it may be counted
        anew."""
        known = self._rows.get(name)
        if known is None:
            # A row starts on a cache line, so that two threads never write one.
            padded = -(-width // 16) * 16
            array = self.zeros((self.step.max_tokens * per_token, padded), np.float32)[:, :width]
            known = self._rows[name] = Rows(name, array, count)
        if known.width != width or len(known.array) != self.step.max_tokens * per_token:
            raise ValueError(
                f"buffer {name} is [{len(known.array)}, {known.width}], asked for [{self.step.max_tokens * per_token}, {width}]"
            )
        known.count = count
        known.quantized.clear()
        return known

    def _wants_scratch(self, record: np.ndarray, fields: tuple[str, ...], n_bytes: int) -> None:
        self._scratch_users.append((record, fields))
        self._scratch_bytes = max(self._scratch_bytes, n_bytes)

    # -- weights
    def weight(self, name: str, n_rows: int, k: int) -> Weight:
        """The matrix `name` (n_rows, k); ModelLoadError if it is missing or has another shape."""
        return self._weight(self.model.need(name, (n_rows, k)))

    def tower(self, name: str, n_experts: int, n_rows: int, k: int) -> Weight:
        """The stacked matrices `name` (n_experts, n_rows, k)."""
        return self._weight(self.model.need(name, (n_experts, n_rows, k)))

    def _weight(self, info: TensorInfo) -> Weight:
        try:
            kernels = encoding_kernels(info.encoding.name)
        except ModelLoadError as error:
            raise ModelLoadError(f"tensor '{info.name}': {error}") from None
        *_, n_rows, k = info.shape
        slice_bytes = info.slice_bytes if len(info.shape) == 3 else 0
        return Weight(
            info.name, info.encoding.name, info.encoding.activation, self.address_of(info), n_rows, k, info.row_bytes, kernels, slice_bytes
        )

    def vector(self, name: str, n: int) -> Address:
        """A float32 vector (norm, bias, factors): copied, and widened where the file holds F16 or BF16."""
        return self._vector(self.model.need(name, (n,), ("F32", "F16", "BF16")))

    def maybe_vector(self, name: str, n: int) -> Address:
        """The same for one that may be absent: 0 then."""
        info = self.model.maybe(name, (n,), ("F32", "F16", "BF16"))
        return 0 if info is None else self._vector(info)

    def _vector(self, info: TensorInfo) -> Address:
        return self.keep_vector(as_float32(self.model.bytes_of(info.name), info.encoding.name))

    def keep_vector(self, values: np.ndarray) -> Address:
        copy = self.zeros(len(values), np.float32)
        copy[:] = values
        return copy.ctypes.data

    # -- operations
    def embed(self, table: Weight, out: Rows) -> None:
        record = pack(
            embedding.EMBED_FIELDS, count=out.count, tokens=self.step.tokens.ctypes.data, w=table.address, w_stride=table.row_bytes,
            k=table.k,
            decode_fn=table.kernels.decode_address, out=out.address, out_stride=out.stride,
        )  # fmt: skip
        self.program.add(embedding.embed, record, f"{out.name} = {table.name}[tokens] ({table.encoding})")
        out.quantized.clear()

    def gather_sampled(self, x: Rows, out: Rows) -> None:
        record = pack(
            embedding.GATHER_FIELDS, count=out.count, index=self.step.sampled.ctypes.data, x=x.address, x_stride=x.stride, width=x.width,
            out=out.address, out_stride=out.stride,
        )  # fmt: skip
        self.program.add(embedding.gather, record, f"{out.name} = {x.name}[sampled]")
        out.quantized.clear()

    def rmsnorm(self, x: Rows, weight: Address, eps: float, out: Rows, label: str) -> None:
        record = pack(
            norm.RMSNORM_FIELDS, count=x.count, x=x.address, x_stride=x.stride, width=x.width, add=0, add_stride=0, weight=weight,
            eps=float(eps),
            out=out.address, out_stride=out.stride,
        )  # fmt: skip
        self.program.add(norm.rmsnorm, record, f"{out.name} = rmsnorm({x.name}, {label})")
        out.quantized.clear()

    def activation(self, x: Rows, layout: str, barrier: bool = True) -> tuple[Address, int]:
        """Address and row stride of x in an activation layout; quantizes it unless its present contents already were."""
        if layout == "f32":
            return x.address, x.stride
        if layout not in x.quantized:
            stride = quantize.activation_row_bytes(layout, x.width)
            name = f"{x.name}:{layout}"
            known = self._activations.get(name)
            if known is None:
                known = self._activations[name] = self.zeros((len(x.array), stride), np.uint8)
            record = pack(
                quantize.FIELDS, count=x.count, x=x.address, x_stride=x.stride, k=x.width, out=known.ctypes.data, out_stride=stride,
                layout=quantize.LAYOUTS.index(layout),
            )  # fmt: skip
            self.program.add(quantize.quantize, record, f"{name}", barrier)
            x.quantized[layout] = known.ctypes.data, stride
        return x.quantized[layout]

    def activations(self, x: Rows, weights: list[Weight]) -> None:
        """Quantize x for all of `weights` at once, with one barrier after the last."""
        missing = [layout for layout in dict.fromkeys(w.layout for w in weights) if layout != "f32" and layout not in x.quantized]
        for layout in missing:
            self.activation(x, layout, barrier=layout == missing[-1])

    def matmul(
        self, w: Weight, x: Rows, out: Rows, *, accumulate: bool = False, bias: Address = 0, scale: Address = 0, barrier: bool = True
    ) -> np.ndarray:
        """out (+)= x · wᵀ * scale + bias. Returns the record."""
        if w.k != x.width or w.n_rows != out.width:
            raise ModelLoadError(f"{w.name} is ({w.n_rows}, {w.k}), but {x.name} has {x.width} values and {out.name} {out.width}")
        act, act_stride = self.activation(x, w.layout)
        tile_bytes = tile_scratch_bytes(w.k)
        record = pack(
            matmul.FIELDS, count=x.count, act=act, act_stride=act_stride, w=w.address, w_stride=w.row_bytes, k=w.k, n_rows=w.n_rows,
            out=out.address, out_stride=out.stride, rows_fn=w.kernels.rows_address, tile_fn=w.kernels.tile_address, bias=bias, scale=scale,
            accumulate=accumulate, scratch=0, scratch_stride=0, tile_scratch_bytes=tile_bytes, max_count=len(x.array),
        )  # fmt: skip
        self._wants_scratch(record, matmul.FIELDS, matmul.scratch_bytes(len(x.array), tile_bytes))
        self.program.add(matmul.matmul, record, f"{out.name} {'+' if accumulate else ''}= {w.name} ({w.encoding}) · {x.name}", barrier)
        out.quantized.clear()
        return record

    def head(self, w: Weight, h: Rows, *, bias: Address, scale: Address) -> None:
        """Logits of the sampled rows. Which rows of the logits buffer they go to differs from run to run: the runner sets `head_record`."""
        logits = Rows("logits", self.logits, h.count)
        self.head_record = self.matmul(w, h, logits, bias=bias, scale=scale)

    def swiglu(self, gate: Rows, up: Rows, out: Rows) -> None:
        record = pack(
            elementwise.SWIGLU_FIELDS, count=gate.count, gate=gate.address, gate_stride=gate.stride, up=up.address, up_stride=up.stride,
            width=gate.width,
            out=out.address, out_stride=out.stride,
        )  # fmt: skip
        self.program.add(elementwise.swiglu, record, f"{out.name} = silu({gate.name}) * {up.name}")
        out.quantized.clear()

    def gated_add(self, x: Rows, y: Rows, gate: Rows) -> None:
        record = pack(
            elementwise.GATED_ADD_FIELDS, count=x.count, x=x.address, x_stride=x.stride, width=x.width, y=y.address, y_stride=y.stride,
            gate=gate.address, gate_stride=gate.stride,
        )  # fmt: skip
        self.program.add(elementwise.gated_add, record, f"{x.name} += sigmoid({gate.name}) * {y.name}")
        x.quantized.clear()

    # -- attention
    def rope_table(self, frequencies: np.ndarray, magnitude: float) -> tuple[Address, int]:
        """Cosines and sines of this step's positions; address and bytes between two tokens."""
        angles = self.zeros(len(frequencies), np.float64)
        angles[:] = frequencies
        table = self.zeros((self.step.max_tokens, -(-2 * len(frequencies) // 16) * 16), np.float32)
        record = pack(
            rope.ROPE_TABLE_FIELDS, count=self.count("tokens"), positions=self.step.positions.ctypes.data, frequencies=angles.ctypes.data,
            half=len(frequencies), magnitude=float(magnitude), table=table.ctypes.data, table_stride=table.strides[0],
        )  # fmt: skip
        self.program.add(rope.rope_table, record, "cosines and sines of the positions", barrier=False)
        return table.ctypes.data, table.strides[0]

    def attention_plan(self, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        """How this step's tokens are cut up for attention; once a step, before the first `attention`."""
        step = self.step
        block_size = self.kv_layouts[0].block_size
        chunks = -(-step.max_blocks * block_size // attention_ops.chunk_tokens(block_size))
        slots = min(step.max_seqs * chunks, _MAX_SLOTS)
        self._plan = self.zeros(attention_ops.plan_words(step.max_tokens, slots), np.int32)
        self._partials = slots, self.zeros(slots * attention_ops.partial_bytes(n_heads, head_dim), np.uint8)
        record = pack(
            attention_ops.PLAN_FIELDS, count=self.count("tokens"), positions=step.positions.ctypes.data, seqs=step.seqs.ctypes.data,
            tile_tokens=attention_ops.tile_tokens(n_heads, n_kv_heads), chunk_tokens=attention_ops.chunk_tokens(block_size), n_slots=slots,
            plan=self._plan.ctypes.data, max_items=step.max_tokens + slots,
        )  # fmt: skip
        self.program.add(attention_ops.attention_plan, record, "plan of attention")

    def rope_and_store(
        self,
        il: int,
        q: Rows,
        k: Rows,
        v: Rows,
        *,
        layout: int,
        table: tuple[Address, int],
        half: int,
        q_norm: Address,
        k_norm: Address,
        eps: float,
    ) -> None:
        """Norm the heads (weights may be 0), turn q and k in place, write k and v of layer `il` to their KV blocks."""
        kv, step = self.kv_layouts[il], self.step
        k_cache, v_cache = self._kv_cache(il)
        record = pack(
            rope.ROPE_STORE_FIELDS, count=q.count, q=q.address, q_stride=q.stride, k=k.address, k_stride=k.stride, v=v.address,
            v_stride=v.stride,
            n_heads=q.width // kv.head_dim, n_kv_heads=kv.n_kv_heads, head_dim=kv.head_dim, layout=layout, half=half, table=table[0],
            table_stride=table[1], q_norm=q_norm, k_norm=k_norm, eps=float(eps), k_cache=k_cache.ctypes.data, v_cache=v_cache.ctypes.data,
            block_size=kv.block_size, num_blocks=self.num_kv_blocks, kv_format=kv.kv_format, k_bytes=kv.k_bytes, v_bytes=kv.v_bytes,
            positions=step.positions.ctypes.data, seqs=step.seqs.ctypes.data,
            block_tables=step.block_tables.ctypes.data, block_tables_stride=step.block_tables.strides[0],
        )  # fmt: skip
        self.program.add(rope.rope_store, record, f"turn {q.name}, {k.name}; store {k.name}, {v.name} of layer {il}")
        q.quantized.clear()
        k.quantized.clear()

    def attention(self, il: int, q: Rows, out: Rows, scale: float) -> None:
        """out = causal attention of q over the stored keys and values of layer `il`."""
        kv, step = self.kv_layouts[il], self.step
        k_cache, v_cache = self._kv_cache(il)
        n_heads = q.width // kv.head_dim
        k_product, v_product = panel.PRODUCTS[kv.dtype]
        record = pack(
            attention_ops.ATTENTION_FIELDS, plan=self._plan.ctypes.data, max_items=step.max_tokens + self._partials[0], q=q.address,
            q_stride=q.stride,
            out=out.address, out_stride=out.stride, n_heads=n_heads, n_kv_heads=kv.n_kv_heads, head_dim=kv.head_dim, scale=float(scale),
            k_cache=k_cache.ctypes.data, v_cache=v_cache.ctypes.data, block_size=kv.block_size, num_blocks=self.num_kv_blocks,
            block_tables=step.block_tables.ctypes.data,
            block_tables_stride=step.block_tables.strides[0], k_bytes=kv.k_bytes, k_stride=kv.k_stride, v_bytes=kv.v_bytes,
            v_stride=kv.v_stride, k_product_fn=k_product.address, v_product_fn=v_product.address,
            chunk_tokens=attention_ops.chunk_tokens(kv.block_size),
            partials=self._partials[1].ctypes.data, scratch=0, scratch_stride=0,
        )  # fmt: skip
        self._wants_scratch(
            record, attention_ops.ATTENTION_FIELDS, attention_ops.scratch_bytes(n_heads, kv.n_kv_heads, kv.head_dim, kv.block_size)
        )
        self.program.add(attention_ops.attention, record, f"{out.name} = attention({q.name}) of layer {il}")
        self.program.add(attention_ops.attention_merge, record, f"{out.name}: merge the chunks of long contexts")
        out.quantized.clear()

    # -- experts
    def route(self, logits: Rows, top_k: int, *, scores: int, bias: Address, normalize: bool, scale: float) -> Routes:
        """Choose top_k experts for every row of router logits and sort the pairs by expert."""
        n_experts, max_rows = logits.width, len(logits.array)
        factor_source = next(c.source for c in self.counts if c.address == logits.count)
        pairs = self.count(factor_source, top_k)
        ids, weights = (
            self._shared("router ids", (max_rows, top_k), np.int32),
            self._shared("router weights", (max_rows, top_k), np.float32),
        )
        offsets, order = self._shared("expert offsets", n_experts + 1, np.int32), self._shared("expert pairs", max_rows * top_k, np.int32)
        record = pack(
            router.ROUTER_FIELDS, count=logits.count, logits=logits.address, logits_stride=logits.stride, n_experts=n_experts,
            top_k=top_k, scores=scores,
            bias=bias, normalize=normalize, scale=float(scale), ids=ids.ctypes.data, weights=weights.ctypes.data, scratch=0,
            scratch_stride=0,
        )  # fmt: skip
        self._wants_scratch(record, router.ROUTER_FIELDS, router.scratch_bytes(n_experts))
        self.program.add(router.route, record, f"choose {top_k} of {n_experts} experts")
        record = pack(
            router.GROUP_FIELDS, count=pairs, ids=ids.ctypes.data, n_experts=n_experts, offsets=offsets.ctypes.data,
            pairs=order.ctypes.data,
        )  # fmt: skip
        self.program.add(router.group_by_expert, record, "sort the pairs by expert")
        return Routes(n_experts, top_k, pairs, weights, offsets, order)

    def experts(
        self, routes: Routes, h: Rows, gate: Weight, up: Weight, down: Weight, x: Rows, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """x += weighted sum of the chosen experts' down(silu(gate · h) * (up · h)). `meanwhile` adds operations that need not wait for
        them: they are computed while slices are read."""
        streamed = self._streamed(routes, h, gate, up, down, meanwhile or (lambda: None))
        self.activations(h, [gate, up])
        act, act_stride = self.activation(h, gate.layout)
        up_act, up_act_stride = self.activation(h, up.layout)
        hidden = self.rows("expert hidden", gate.n_rows, routes.pairs, routes.top_k)
        up_out = self.rows("expert up", up.n_rows, routes.pairs, routes.top_k)
        y = self.rows("expert out", down.n_rows, routes.pairs, routes.top_k)
        max_pairs = len(hidden.array)
        shared = {"n_experts": routes.n_experts, "offsets": routes.offsets.ctypes.data, "pairs": routes.order.ctypes.data, "scratch": 0,
                  "scratch_stride": 0, "max_count": max_pairs, **streamed.wave}  # fmt: skip
        gate_tower, up_tower, down_tower = (self._tower(tower, streamed) for tower in (gate, up, down))
        if self.advises and not streamed.first:
            record = pack(
                moe.ADVISE_FIELDS, offsets=routes.offsets.ctypes.data, n_experts=routes.n_experts, n_towers=3, tower0=gate_tower,
                tower1=up_tower, tower2=down_tower,
            )  # fmt: skip
            self.program.add(moe.advise, record, f"ask for the chosen slices of {gate.name}, {up.name}, {down.name}", barrier=False)
        record = pack(
            moe.UP_FIELDS, **shared, top_k=routes.top_k, act=act, act_stride=act_stride, up_act=up_act, up_act_stride=up_act_stride,
            gate_tower=gate_tower, gate_stride=gate.row_bytes, gate_rows_fn=gate.kernels.rows_address,
            gate_tile_fn=gate.kernels.tile_address, gate_scale=self._expert_scale(gate, routes.n_experts),
            up_tower=up_tower, up_stride=up.row_bytes, up_rows_fn=up.kernels.rows_address,
            up_tile_fn=up.kernels.tile_address, up_scale=self._expert_scale(up, routes.n_experts),
            k=gate.k, n_rows=gate.n_rows, gate_out=hidden.address, up_out=up_out.address, out_stride=hidden.stride,
        )  # fmt: skip
        self._wants_scratch(record, moe.UP_FIELDS, moe.scratch_bytes(max_pairs, tile_scratch_bytes(gate.k)))
        self.program.add(
            moe.experts_up_streamed if streamed.first else moe.experts_up,
            record,
            f"{hidden.name} = silu({gate.name} · {h.name}) * ({up.name} · {h.name}) ({gate.encoding}, {up.encoding})",
        )
        act, act_stride = self.activation(hidden, down.layout)
        record = pack(
            moe.DOWN_FIELDS, **shared, act=act, act_stride=act_stride, tower=down_tower, stride=down.row_bytes,
            rows_fn=down.kernels.rows_address, tile_fn=down.kernels.tile_address, scale=self._expert_scale(down, routes.n_experts),
            k=down.k, n_rows=down.n_rows, out=y.address, out_stride=y.stride,
        )  # fmt: skip
        self._wants_scratch(record, moe.DOWN_FIELDS, moe.scratch_bytes(max_pairs, tile_scratch_bytes(down.k)))
        self.program.add(
            moe.experts_down_streamed if streamed.first else moe.experts_down,
            record,
            f"{y.name} = {down.name} ({down.encoding}) · {hidden.name}",
        )
        if streamed.first:
            self.program.repeat_from(streamed.first, self.stream.visit.again_at)
        record = pack(
            moe.COMBINE_FIELDS, count=x.count, top_k=routes.top_k, width=x.width, weights=routes.weights.ctypes.data, y=y.address,
            y_stride=y.stride,
            x=x.address, x_stride=x.stride,
        )  # fmt: skip
        self.program.add(moe.combine, record, f"{x.name} += weighted {y.name}")
        x.quantized.clear()

    def _streamed(self, routes: Routes, h: Rows, gate: Weight, up: Weight, down: Weight, meanwhile: Callable[[], None]) -> Streamed:
        """Add the operations that acquire the layer's slices, if they are streamed, and `meanwhile` behind the first of them."""
        by_tokens = next(c.source for c in self.counts if c.address == h.count) == "tokens"
        asked = self.stream and self.stream.asking(
            (gate.name, up.name, down.name), offsets=routes.offsets.ctypes.data, tokens=h.count,
            seqs=self.count("seqs") if by_tokens else h.count, top_k=routes.top_k,
        )  # fmt: skip
        if not asked:
            meanwhile()
            return Streamed(0, {}, dict.fromkeys(moe.WAVE_FIELDS, 0))
        asking, places = asked
        # Thread 0 looks up and posts reads, which touches nothing that the operations up to the next barrier read or write.
        self.program.add(slots.acquire_slices, asking.record, f"slots of {gate.name}, {up.name}, {down.name}", barrier=False)
        meanwhile()
        first = len(self.program.operations)
        meets = all(layout == "f32" or layout in h.quantized for layout in (gate.layout, up.layout))
        self.program.add(slots.acquire_more, asking.record, "the next of them, in later waves", barrier=meets)
        waiting = self._shared("experts waited for", (self.num_threads, -(-routes.n_experts // 16) * 16), np.int32)
        visit = self.stream.visit
        wave = {
            "wave": visit.wave.ctypes.data,
            "n_wave": visit.n_wave_at,
            "waiting": waiting.ctypes.data,
            "waiting_stride": waiting.strides[0],
            "ended": visit.store.ended_at,
        }
        return Streamed(first, places, wave)

    def _tower(self, tower: Weight, streamed: Streamed) -> Address:
        record = pack(moe.TOWER_FIELDS, base=tower.address, slice_bytes=tower.slice_bytes, places=streamed.places.get(tower.name, 0))
        self._keep.append(record)
        return record.ctypes.data

    def _expert_scale(self, tower: Weight, n_experts: int) -> Address:
        """Address of the tower's second scale, one f32 an expert, or 0 (see FAMILIES: NVFP4 files have them)."""
        return self.maybe_vector(tower.name.removesuffix(".weight") + ".scale", n_experts)

    def _shared(self, name: str, shape: int | tuple[int, ...], dtype: object) -> np.ndarray:
        """A helper array that all layers share (they run one after the other)."""
        key = f"{name} {shape}"
        if key not in self._arrays:
            self._arrays[key] = self.zeros(shape, dtype)
        return self._arrays[key]

    # -- the end
    def finish(self) -> np.ndarray:
        """Give every record its scratch and return the program's table."""
        acquired = next((o.record for o in self.program.operations if o.kernel is slots.acquire_slices), None)
        if acquired is not None:
            self.program.add(slots.release_slices, acquired, "let go of the last layer's slots")
        stride = -(-self._scratch_bytes // 64) * 64
        scratch = self.zeros(max(stride, 64) * self.num_threads, np.uint8)
        for record, fields in self._scratch_users:
            record[fields.index("scratch")] = scratch.ctypes.data
            record[fields.index("scratch_stride")] = stride
        return self.program.table()


@dataclass(frozen=True, slots=True)
class Streamed:
    """A layer's streaming: the operation to go back to for another wave (0: the layer is not streamed), its towers' tables of places by
    name, and the fields of its work list."""

    first: int
    places: dict[str, Address]
    wave: dict[str, Address]


@dataclass(frozen=True, slots=True)
class Routes:
    """What the router chose this step: `pairs` counts (token, slot) pairs; `order` holds them sorted by expert, cut at `offsets`."""

    n_experts: int
    top_k: int
    pairs: Address
    weights: np.ndarray
    offsets: np.ndarray
    order: np.ndarray


def as_float32(data: np.ndarray, encoding: str) -> np.ndarray:
    """Bytes of an F32, F16 or BF16 vector as float32."""
    if encoding == "F32":
        return data.view(np.float32)
    if encoding == "F16":
        return data.view(np.float16).astype(np.float32)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
