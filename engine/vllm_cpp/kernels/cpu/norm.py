"""Root-mean-square norms of rows, with the residual addition that stands before them.

Owns `x / sqrt(mean(x^2) + eps) * weight` for rows and for heads, in one fixed order of summation. Must not know which norm of a model this is.
"""

from __future__ import annotations

RMSNORM_FIELDS = (
    "count",  # address of the int64 number of rows
    "x", "x_stride", "width",  # f32 rows; bytes between two; values a row
    "add", "add_stride",  # f32 rows added to x (x is updated) before it is normed; 0: nothing is added
    "weight",  # f32[width]
    "eps",  # float
    "out", "out_stride",  # f32 rows; may be x itself
)  # fmt: skip
_COUNT, _X, _X_STRIDE, _WIDTH, _ADD, _ADD_STRIDE, _WEIGHT, _EPS, _OUT, _OUT_STRIDE = range(len(RMSNORM_FIELDS))
