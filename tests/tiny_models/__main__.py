"""Write one tiny model from the shell."""

from __future__ import annotations

import argparse
from pathlib import Path

from tiny_models import FAMILIES, build

parser = argparse.ArgumentParser(prog="python -m tiny_models", description=__doc__)
parser.add_argument("family", choices=sorted(FAMILIES))
parser.add_argument("out", type=Path)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--size", type=int, choices=(0, 1), default=0)
parser.add_argument("--dtype", default="F32", help="an encoding's name, or mix")
parser.add_argument("--shards", type=int, default=1)
args = parser.parse_args()
model = build(args.family, args.seed, args.size, args.dtype)
for written in [model.write(args.out)] if args.shards == 1 else model.write_split(args.out, args.shards):
    print(written)
