"""Turns what a family says about its layers into operations over buffers.

Owns the activation buffers of a model, which rows stand where, what sequences keep between steps, and the operations every model has. What
fewer need is in operations/. Must not know architectures (a family calls `rmsnorm`, `matmul`, …) nor requests (the runner fills the step
arrays).

Every buffer has room for `max_tokens` rows; how many are in use is read from a count cell each step, so a program is built once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import GGUFModel, TensorInfo
from vllm_cpp.gguf_file.hparams import Keys
from vllm_cpp.kernels.buffers import aligned_zeros
from vllm_cpp.kernels.cpu import elementwise, embedding, matmul, norm, quantize, slots
from vllm_cpp.kernels.cpu.kv_cache import KvLayout
from vllm_cpp.kernels.cpu.registry import EncodingKernels, encoding_kernels, tile_scratch_bytes
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.pooling import Pooling
from vllm_cpp.models.program import Program
from vllm_cpp.residency.streaming import ExpertStream

Address = int


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
    num_rows: int
    k: int
    row_bytes: int
    kernels: EncodingKernels
    slice_bytes: int = 0  # towers: bytes between two experts

    def rows(self, first: int, n: int, name: str) -> Weight:
        """Rows first … first + n - 1 as a matrix of their own (a fused projection cut into its parts)."""
        return replace(self, name=name, address=self.address + first * self.row_bytes, num_rows=n)


@dataclass(frozen=True, slots=True)
class Count:
    """A cell the runner sets each step: the number of `source` ("tokens", "sampled" or "seqs") times `factor`."""

    cell: np.ndarray  # int64[1]
    source: str
    factor: int

    @property
    def address(self) -> Address:
        return self.cell.ctypes.data


@dataclass(frozen=True, slots=True)
class State:
    """What each running sequence keeps of a recurrent layer: `stride` bytes apart, in the place of its state id. A run that starts at
    position 0 finds garbage there and starts from zeros."""

    address: Address
    stride: int


def state_stride(num_values: int) -> int:
    """Bytes between two sequences' states of `num_values` float32 values."""
    return -(-num_values // 16) * 64


@dataclass(slots=True)
class StepArrays:
    """What a step is about, at addresses that never change. `max_blocks` KV blocks a sequence. Tokens stand in runs, one a sequence."""

    max_tokens: int
    max_seqs: int
    max_blocks: int
    tokens: np.ndarray = field(init=False)  # i32[max_tokens]
    positions: np.ndarray = field(init=False)  # i32[max_tokens]
    seqs: np.ndarray = field(init=False)  # i32[max_tokens]: row of block_tables
    block_tables: np.ndarray = field(init=False)  # i32[max_seqs, max_blocks]
    sampled: np.ndarray = field(init=False)  # i32[max_tokens]: which rows' logits are wanted
    run_starts: np.ndarray = field(init=False)  # i32[max_seqs + 1]: row of each run's first token; behind the last run, the number of rows
    state_ids: np.ndarray = field(init=False)  # i32[max_seqs]: the place of each run's sequence in a State

    def __post_init__(self) -> None:
        self.tokens = aligned_zeros(self.max_tokens, np.int32)
        self.positions = aligned_zeros(self.max_tokens, np.int32)
        self.seqs = aligned_zeros(self.max_tokens, np.int32)
        self.block_tables = aligned_zeros((self.max_seqs, self.max_blocks), np.int32)
        self.sampled = aligned_zeros(self.max_tokens, np.int32)
        self.run_starts = aligned_zeros(self.max_seqs + 1, np.int32)
        self.state_ids = aligned_zeros(self.max_seqs, np.int32)


class Builder:
    """Collects the operations of one model."""

    def __init__(
        self, model: GGUFModel, address_of: Callable[[TensorInfo], Address], step: StepArrays, *, num_threads: int, out_width: int,
        block_size: int, kv_layouts: list[KvLayout | None], num_kv_blocks: int, stream: ExpertStream | None = None, advises: bool = False,
        pooling: Pooling | None = None,
    ):  # fmt: skip
        """`out_width`: values of a row that comes out. `kv_layouts`: None for a layer without keys and values. `stream`: where routed
        experts are streamed. `advises`: ask for chosen slices in the mapping before they are touched. `pooling`: the model embeds."""
        self.model = model
        self.keys = Keys(model)
        self.stream = stream
        self.advises = advises
        self.pooling = pooling
        self.address_of = address_of
        self.step = step
        self.num_threads = num_threads
        self.block_size = block_size
        self.kv_layouts = kv_layouts
        self.num_kv_blocks = num_kv_blocks
        self.logits = aligned_zeros((step.max_seqs, out_width), np.float32)  # or embeddings
        self.first_row: np.ndarray | None = None  # int64[1]: address of the row of `logits` that the step's first result goes to
        self.program = Program()
        self.counts: list[Count] = []
        self._kv_caches: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.keep: list[np.ndarray] = []  # arrays whose addresses stand in records
        self.arrays: dict[str, np.ndarray] = {}
        self._activations: dict[str, np.ndarray] = {}
        self._rows: dict[str, Rows] = {}
        self._scratch_users: list[tuple[np.ndarray, tuple[str, ...]]] = []
        self._scratch_bytes = 0
        self.has_state = False  # some layer is recurrent

    # -- memory
    def zeros(self, shape: int | tuple[int, ...], dtype: object) -> np.ndarray:
        array = aligned_zeros(shape, dtype)
        self.keep.append(array)
        return array

    def kv_cache(self, il: int) -> tuple[np.ndarray, np.ndarray]:
        """The KV blocks of layer `il`: made at first use, when the shapes of tensors have borne out the numbers that size them."""
        if il not in self._kv_caches:
            try:
                self._kv_caches[il] = self.kv_layout(il).allocate(self.num_kv_blocks)
            except MemoryError as error:
                n_bytes = self.num_kv_blocks * sum(layout.block_bytes for layout in self.kv_layouts if layout)
                raise ModelLoadError(
                    f"{self.model.path}: not enough memory for {self.num_kv_blocks} KV blocks of {self.block_size} tokens, "
                    f"which take {n_bytes} bytes; lower num_blocks, block_size, kv_cache_memory_bytes or max_model_len"
                ) from error
        return self._kv_caches[il]

    def kv_layout(self, il: int) -> KvLayout:
        """The layout of a layer that has keys and values."""
        layout = self.kv_layouts[il]
        assert layout is not None, f"layer {il} keeps no keys and values"
        return layout

    def state(self, num_values: int) -> State:
        """Room for `num_values` float32 values a running sequence. Pages that no sequence comes to are never touched."""
        self.has_state = True
        try:
            array = self.zeros((self.step.max_seqs, state_stride(num_values) // 4), np.float32)
        except MemoryError as error:
            raise ModelLoadError(
                f"{self.model.path}: not enough memory for the recurrent state of {self.step.max_seqs} sequences; lower max_num_seqs"
            ) from error
        return State(array.ctypes.data, array.strides[0])

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

    def wants_scratch(self, record: np.ndarray, fields: tuple[str, ...], n_bytes: int) -> None:
        self._scratch_users.append((record, fields))
        self._scratch_bytes = max(self._scratch_bytes, n_bytes)

    # -- weights
    def weight(self, name: str, num_rows: int, k: int) -> Weight:
        """The matrix `name` (num_rows, k); ModelLoadError if it is missing or has another shape."""
        return self._weight(self.model.need(name, (num_rows, k)))

    def tower(self, name: str, num_experts: int, num_rows: int, k: int) -> Weight:
        """The stacked matrices `name` (num_experts, num_rows, k)."""
        return self._weight(self.model.need(name, (num_experts, num_rows, k)))

    def _weight(self, info: TensorInfo) -> Weight:
        try:
            kernels = encoding_kernels(info.encoding.name)
        except ModelLoadError as error:
            raise ModelLoadError(f"tensor '{info.name}': {error}") from None
        return self.weight_of(info, kernels)

    def weight_of(self, info: TensorInfo, kernels: EncodingKernels) -> Weight:
        """A matrix or tower, for these kernels."""
        *_, num_rows, k = info.shape
        slice_bytes = info.slice_bytes if len(info.shape) == 3 else 0
        encoding, address = info.encoding, self.address_of(info)
        return Weight(info.name, encoding.name, encoding.activation, address, num_rows, k, info.row_bytes, kernels, slice_bytes)

    def vector(self, name: str, n: int) -> Address:
        """A float32 vector (norm, bias, factors): copied, and widened where the file holds F16 or BF16."""
        return self.keep_vector(self.floats(name, (n,)))

    def maybe_vector(self, name: str, n: int) -> Address:
        """The same for one that may be absent: 0 then."""
        return self.vector(name, n) if name in self.model.tensors else 0

    def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The numbers of a tensor that is not quantized, float32 of that shape; to be read only."""
        info = self.model.need(name, shape, ("F32", "F16", "BF16"))
        return as_float32(self.model.bytes_of(name), info.encoding.name).reshape(shape)

    def table(self, name: str, n: int, width: int) -> Address:
        """The same, f32[n, width], for what is too large to copy without need: in the file where it is F32 there."""
        info = self.model.need(name, (n, width), ("F32", "F16", "BF16"))
        return self.address_of(info) if info.encoding.name == "F32" else self.keep_vector(self.floats(name, (n, width)).ravel())

    def keep_vector(self, values: np.ndarray) -> Address:
        copy = self.zeros(len(values), np.float32)
        copy[:] = values
        return copy.ctypes.data

    # -- operations
    def embed(self, table: Weight, out: Rows, *, of: Address = 0) -> None:
        """out = the table's rows of this step's tokens, or of the i32 numbers at address `of`."""
        record = pack(
            embedding.EMBED_FIELDS, count=out.count, tokens=of or self.step.tokens.ctypes.data, w=table.address, w_stride=table.row_bytes,
            k=table.k,
            decode_fn=table.kernels.decode_address, out=out.address, out_stride=out.stride,
        )  # fmt: skip
        self.program.add(embedding.embed, record, f"{out.name} = {table.name}[{'tokens' if not of else '...'}] ({table.encoding})")
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
        if w.k != x.width or w.num_rows != out.width:
            raise ModelLoadError(f"{w.name} is ({w.num_rows}, {w.k}), but {x.name} has {x.width} values and {out.name} {out.width}")
        act, act_stride = self.activation(x, w.layout)
        tile_bytes = tile_scratch_bytes(w.k)
        record = pack(
            matmul.FIELDS, count=x.count, act=act, act_stride=act_stride, w=w.address, w_stride=w.row_bytes, k=w.k, n_rows=w.num_rows,
            out=out.address, out_stride=out.stride, rows_fn=w.kernels.rows_address, tile_fn=w.kernels.tile_address, bias=bias, scale=scale,
            accumulate=accumulate, scratch=0, scratch_stride=0, tile_scratch_bytes=tile_bytes, max_count=len(x.array),
        )  # fmt: skip
        self.wants_scratch(record, matmul.FIELDS, matmul.scratch_bytes(len(x.array), tile_bytes))
        self.program.add(matmul.matmul, record, f"{out.name} {'+' if accumulate else ''}= {w.name} ({w.encoding}) · {x.name}", barrier)
        out.quantized.clear()
        return record

    def head(self, w: Weight, h: Rows, *, bias: Address, scale: Address) -> None:
        """Logits of the sampled rows."""
        logits = Rows("logits", self.logits, h.count)
        self.ends_in(self.matmul(w, h, logits, bias=bias, scale=scale), matmul.FIELDS)

    def ends_in(self, record: np.ndarray, fields: tuple[str, ...]) -> None:
        """This record's `out` is where results go. Which rows of `logits` these are differs from run to run: the runner sets it."""
        at = fields.index("out")
        self.first_row = record[at : at + 1]

    def swiglu(self, gate: Rows, up: Rows, out: Rows) -> None:
        """out = silu(gate) * up."""
        self.activate(gate, up, out, elementwise.SILU_GATED)

    def activate(self, gate: Rows | None, up: Rows, out: Rows, activation: elementwise.Activation) -> None:
        """out = the activation of gate and up; None for the gate where the activation has none. `out` may be gate or up."""
        if activation.gated != (gate is not None):
            raise ValueError(f"{activation} {'needs' if activation.gated else 'has no'} gate")
        record = pack(
            elementwise.ACTIVATE_FIELDS, count=up.count, kind=activation.kind, limit=float(activation.limit),
            gate=gate.address if gate else 0, gate_stride=gate.stride if gate else 0, up=up.address, up_stride=up.stride, width=up.width,
            out=out.address, out_stride=out.stride,
        )  # fmt: skip
        operands = f"{gate.name}, {up.name}" if gate else up.name
        self.program.add(elementwise.activate, record, f"{out.name} = {activation}({operands})")
        out.quantized.clear()

    def add(self, x: Rows, y: Rows, factor: float = 1.0) -> None:
        """x += factor * y."""
        self._add(x, y.address, y.stride, 1.0, factor, f"{x.name} += {factor:g} * {y.name}")

    def scale(self, x: Rows, factor: float) -> None:
        """x *= factor."""
        self._add(x, 0, 0, factor, 0.0, f"{x.name} *= {factor:g}")

    def clear(self, x: Rows) -> None:
        """x = 0."""
        self._add(x, 0, 0, 0.0, 0.0, f"{x.name} = 0")

    def _add(self, x: Rows, y: Address, y_stride: int, keep: float, factor: float, label: str) -> None:
        record = pack(
            elementwise.ADD_FIELDS, count=x.count, x=x.address, x_stride=x.stride, width=x.width, y=y, y_stride=y_stride, keep=keep,
            factor=factor,
        )  # fmt: skip
        self.program.add(elementwise.add, record, label)
        x.quantized.clear()

    def gated_add(self, x: Rows, y: Rows, gate: Rows) -> None:
        record = pack(
            elementwise.GATED_ADD_FIELDS, count=x.count, x=x.address, x_stride=x.stride, width=x.width, y=y.address, y_stride=y.stride,
            gate=gate.address, gate_stride=gate.stride,
        )  # fmt: skip
        self.program.add(elementwise.gated_add, record, f"{x.name} += sigmoid({gate.name}) * {y.name}")
        x.quantized.clear()

    def shared(self, name: str, shape: int | tuple[int, ...], dtype: object) -> np.ndarray:
        """A helper array that all layers share (they run one after the other)."""
        key = f"{name} {shape}"
        if key not in self.arrays:
            self.arrays[key] = self.zeros(shape, dtype)
        return self.arrays[key]

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


def as_float32(data: np.ndarray, encoding: str) -> np.ndarray:
    """Bytes of an F32, F16 or BF16 vector as float32."""
    if encoding == "F32":
        return data.view(np.float32)
    if encoding == "F16":
        return data.view(np.float16).astype(np.float32)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
