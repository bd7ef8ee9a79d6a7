"""Operations value by value: activations, biases, additions.

Owns the vector forms of sigmoid and silu; the bits of a value never depend on where in a row it stands. Must not know what the rows mean.
"""

from __future__ import annotations

SWIGLU_FIELDS = (
    "count",  # address of the int64 number of rows
    "gate", "gate_stride", "up", "up_stride",  # f32 rows; bytes between two (both in one buffer: up = gate + 4 * width)
    "width",  # values a row
    "out", "out_stride",  # f32 rows; may be gate or up itself
)  # fmt: skip
_COUNT, _GATE, _GATE_STRIDE, _UP, _UP_STRIDE, _WIDTH, _OUT, _OUT_STRIDE = range(len(SWIGLU_FIELDS))

ADD_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "width",  # f32 rows added to; bytes between two; values a row
    "y", "y_stride",  # f32 rows added (y_stride 0: one row, a bias, added to each)
)  # fmt: skip
_A_COUNT, _A_X, _A_X_STRIDE, _A_WIDTH, _A_Y, _A_Y_STRIDE = range(len(ADD_FIELDS))

GATED_ADD_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "width",  # f32 rows added to; bytes between two; values a row
    "y", "y_stride",  # f32 rows added, each times sigmoid(its gate)
    "gate", "gate_stride",  # one f32 a row; bytes between two
)  # fmt: skip
_G_COUNT, _G_X, _G_X_STRIDE, _G_WIDTH, _G_Y, _G_Y_STRIDE, _G_GATE, _G_GATE_STRIDE = range(len(GATED_ADD_FIELDS))
