"""The offload document: one JSON object that says where every weight lives and which device computes it.

Owns: reading it, refusing what is wrong in it, merging it with what this process was told before, and resolving it against the
environment. Must not know how a residency is carried out. The words of every refusal are a contract with scripts: change none lightly.

`parse` is pure. `install` merges a document into the process and returns what is then in force; precedence per field is
environment > document > default.
"""

from .document import OffloadDocument, Override, ResidencyRequest
from .install import decide, freeze_expert_stream, freeze_geometry, install, preview, resolve, say_mapped_placement
from .parse import parse
from .resolve import Residency
from .shorthand import SHORTHANDS, desugar
from .weight_offload import WeightOffload

__all__ = [
    "SHORTHANDS",
    "OffloadDocument",
    "Override",
    "Residency",
    "ResidencyRequest",
    "WeightOffload",
    "decide",
    "desugar",
    "freeze_expert_stream",
    "freeze_geometry",
    "install",
    "parse",
    "preview",
    "resolve",
    "say_mapped_placement",
]
