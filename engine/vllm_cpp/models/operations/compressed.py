"""Attention over a window and compressed entries as operations, and the place of what a sequence keeps for it.

Owns that place: everything lies in the layer's State, float32, whatever the KV dtype. Rings hold the last rows (the window's, and those
that the next entries are made of), and there is room for every entry that the longest sequence can have, so a layer's state grows with
max_model_len: for each token of it, an entry's and a key's values divided by `ratio`. Pages that no sequence comes to are never touched. KV
blocks would not be shorter: a block keeps a row of every token, and of most tokens nothing is wanted once the window has passed. Must not
know architectures (FAMILIES: deepseek4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.kernels.cpu import compressed as kernels
from vllm_cpp.kernels.records import pack
from vllm_cpp.models.builder import Address, Builder, Rows

LANES = 16  # lengths of rows are whole vectors


@dataclass(frozen=True, slots=True)
class Positions:
    """How the last 2 * len(frequencies) values of an entry turn to the position of its first token."""

    frequencies: np.ndarray  # f64: angle a position
    magnitude: float


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of one kind, as they stand in the state: `width` values each, `ratio` tokens a block."""

    width: int
    ratio: int
    address: Address  # of the first sequence's


@dataclass(frozen=True, slots=True)
class Choice:
    """Which entries each token looks at."""

    ids: np.ndarray  # i32[tokens, top]
    num_ids: np.ndarray  # i32[tokens]


class Layer:
    """What one layer keeps and does. Rings are read all through a step; `keep` brings them up to date, once everything has read them."""

    def __init__(self, b: Builder, il: int, *, window: int, width: int, ratio: int, index_width: int) -> None:
        """`width`: values of a row of the window, and of an entry. `ratio` 0: no entries. `index_width` 0: tokens do not choose."""
        for what, n in (("attention.key_length", width), ("attention.indexer.key_length", index_width)):
            if n % LANES:
                raise ModelLoadError(f"{b.model.path}: {what} is {n}, which compressed attention needs to be a multiple of {LANES}")
        self._b, self._il, self._width, self.ratio = b, il, width, ratio
        longest = b.step.max_blocks * b.block_size
        self._window = min(window, longest)
        self._overlap = bool(index_width)  # such layers' blocks are short, and an entry is also made of the block before
        self._ring_rows = ratio * (1 + self._overlap)
        self.blocks = longest // ratio if ratio else 0
        sizes = {"window": self._window * width}
        for kind, n in {"entries": width, "keys": index_width}.items():
            if ratio and n:
                sizes[f"{kind} ring"], sizes[kind] = self._ring_rows * self.row_width(n), self.blocks * n
        try:
            state = b.state(sum(sizes.values()))
        except ModelLoadError as error:
            raise ModelLoadError(f"{error}, or max_model_len (here there is room for {longest} tokens)") from error
        self._stride, self._at, at = state.stride, {}, state.address
        for kind, n in sizes.items():
            self._at[kind], at = at, at + 4 * n
        self._kept: list[tuple[Rows, str, int]] = []

    def row_width(self, width: int) -> int:
        """Values of a row that entries of `width` are made of: values, then weights."""
        return 2 * width * (1 + self._overlap)

    def _step(self) -> dict[str, int]:
        step = self._b.step
        return {
            "count": self._b.count("tokens"),
            "positions": step.positions.ctypes.data,
            "seqs": step.seqs.ctypes.data,
            "run_starts": step.run_starts.ctypes.data,
            "state_ids": step.state_ids.ctypes.data,
            "state_stride": self._stride,
        }

    def compress(self, name: str, kind: str, h: Rows, width: int, eps: float, positions: Positions) -> Entries:
        """Entries of a kind ("entries" or "keys") of every block that this step completes, made of h by the tensors `name`_{kv, gate, ape,
        norm}."""
        b, half = self._b, self.row_width(width) // 2
        rows = b.rows(f"{kind} of {2 * half}", 2 * half, h.count)
        values, weights = (Rows(f"{rows.name}[{part}]", rows.array[:, part * half : (part + 1) * half], h.count) for part in (0, 1))
        kv, gate = b.weight(f"{name}_kv.weight", half, h.width), b.weight(f"{name}_gate.weight", half, h.width)
        b.activations(h, [kv, gate])
        b.matmul(kv, h, values, barrier=False)
        b.matmul(gate, h, weights)
        angles = b.zeros(len(positions.frequencies), np.float64)
        angles[:] = positions.frequencies
        record = pack(
            kernels.COMPRESS_FIELDS, **self._step(), x=rows.address, x_stride=rows.stride, width=width, overlap=self._overlap,
            ratio=self.ratio, ring=self._at[f"{kind} ring"], ring_rows=self._ring_rows,
            ape=b.table(f"{name}_ape.weight", self.ratio, half),
            norm=b.vector(f"{name}_norm.weight", width), epsilon=float(eps), frequencies=angles.ctypes.data, half=len(angles),
            magnitude=float(positions.magnitude), entries=self._at[kind], scratch=0, scratch_stride=0,
        )  # fmt: skip
        b.wants_scratch(record, kernels.COMPRESS_FIELDS, kernels.compress_scratch_bytes(self.ratio, width))
        b.program.add(kernels.compress, record, f"{kind} of layer {self._il}, one for {self.ratio} tokens")
        self._kept.append((rows, f"{kind} ring", self._ring_rows))
        return Entries(width, self.ratio, self._at[kind])

    def choose(self, keys: Entries, q: Rows, weights: Rows, top: int) -> Choice:
        """The `top` blocks whose keys q (heads side by side) meets best, its heads weighed by `weights`."""
        b, num_heads, top = self._b, weights.width, min(top, self.blocks)
        scores = b.shared("block scores", (b.step.max_tokens, self.blocks), np.float32)
        choice = Choice(b.shared("chosen blocks", (b.step.max_tokens, top), np.int32), b.shared("n chosen", b.step.max_tokens, np.int32))
        record = pack(
            kernels.SCORE_FIELDS, **self._step(), q=q.address, q_stride=q.stride, weights=weights.address, weights_stride=weights.stride,
            n_heads=num_heads, width=keys.width, factor=float((keys.width * num_heads) ** -0.5), ratio=self.ratio, top=top,
            keys=keys.address, scores=scores.ctypes.data, scores_stride=scores.strides[0], ids=choice.ids.ctypes.data,
            ids_stride=choice.ids.strides[0], n_ids=choice.num_ids.ctypes.data,
        )  # fmt: skip
        b.program.add(kernels.score_blocks, record, f"scores of blocks for {q.name}")
        b.program.add(kernels.choose_blocks, record, f"the {top} best blocks")
        return choice

    def attend(self, q: Rows, x: Rows, sinks: Address, out: Rows, entries: Entries | None, choice: Choice | None) -> None:
        """out = attention of q (heads side by side) over the window's rows x and the entries, all or the chosen ones."""
        b, num_heads = self._b, q.width // self._width
        max_rows = self._window + (0 if entries is None else self.blocks if choice is None else choice.ids.shape[1])
        record = pack(
            kernels.ATTEND_FIELDS, **self._step(), q=q.address, q_stride=q.stride, n_heads=num_heads, width=self._width,
            scale=float(self._width**-0.5), sinks=sinks, x=x.address, x_stride=x.stride, ring=self._at["window"], window=self._window,
            entries=entries.address if entries else 0, ratio=entries.ratio if entries else 0,
            ids=choice.ids.ctypes.data if choice else 0, ids_stride=choice.ids.strides[0] if choice else 0,
            n_ids=choice.num_ids.ctypes.data if choice else 0, out=out.address, out_stride=out.stride, max_rows=max_rows, scratch=0,
            scratch_stride=0,
        )  # fmt: skip
        b.wants_scratch(record, kernels.ATTEND_FIELDS, kernels.attend_scratch_bytes(max_rows))
        b.program.add(kernels.attend, record, f"{out.name} = attention({q.name}) over {self._window} tokens and entries, layer {self._il}")
        out.quantized.clear()
        self._kept.append((x, "window", self._window))

    def keep(self) -> None:
        """Bring the rings up to date with this step's rows."""
        for x, ring, ring_rows in self._kept:
            record = pack(
                kernels.KEEP_FIELDS, **self._step(), x=x.address, x_stride=x.stride, width=x.width, ring=self._at[ring],
                ring_rows=ring_rows,
            )  # fmt: skip
            self._b.program.add(kernels.keep_rows, record, f"the last {ring_rows} of {x.name} of layer {self._il}")
        self._kept.clear()
