"""An engine without work uses no processor: its workers sleep, whoever waits for a request sleeps too, and nothing polls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tiny_models

# Processor time, not time that passes: how busy the machine is does not matter.
PROGRAM = """
import sys, time
import vllm_cpp
with vllm_cpp.load(sys.argv[1], threads=4, offload_config=sys.argv[2]) as llm:
    llm.generate([[5, 6, 7], [8, 9]], max_tokens=4, ignore_eos=True)
    time.sleep(0.5)  # workers wait awake for a moment, in case another step follows
    before = time.process_time()
    time.sleep(2)
    print(time.process_time() - before)
"""


@pytest.mark.parametrize("document", ["{}", '{"vllm_cpp":{"expert_stream":{"enabled":true}}}'])
def test_an_idle_engine_uses_less_than_a_hundredth_of_a_core(tmp_path: Path, document: str) -> None:
    model = tiny_models.build("qwen3moe", dtype="F32").write(tmp_path / "tiny.gguf")
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(model), document], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 0.01 * 2
