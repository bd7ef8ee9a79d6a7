"""Streamed experts against resident ones: the same bits for every number of slots, and every way streaming speaks or refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import tiny_models
import vllm_cpp
from vllm_cpp import log, models
from vllm_cpp.config import offload
from vllm_cpp.config.engine import EngineParams
from vllm_cpp.config.offload.install import reset as reset_documents
from vllm_cpp.errors import GenerationError, ModelLoadError
from vllm_cpp.gguf_file import open_model
from vllm_cpp.models import registry
from vllm_cpp.residency import streaming
from vllm_cpp.residency.slots import cell_bytes
from vllm_cpp.scheduler.batch import Chunk

MODEL = "qwen2moe-s15-z0-mix"
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 300, 37)]


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    reset_documents()
    log.forget()
    yield
    streaming.forget_store()
    reset_documents()


def streamed(slots: int, **more: object) -> dict[str, object]:
    return {"vllm_cpp": {"expert_stream": {"enabled": True, "slots": slots, **more}}}


@contextmanager
def runner(path: Path, *, slots: int | None, threads: int = 1, **more: object) -> Iterator[models.Runner]:
    stream = {} if slots is None else {"expert_stream": {"enabled": True, "slots": slots, **more}}
    residency = offload.install(offload.parse({"vllm_cpp": stream}))
    with open_model(path) as model:
        loaded = models.load(model, EngineParams(model_path=str(path), threads=threads, num_blocks=16), residency)
        try:
            yield loaded
        finally:
            loaded.close()


def logits(loaded: models.Runner) -> np.ndarray:
    """Of a prompt in two chunks, of another sequence beside it, and of some decoded tokens."""
    rows = [loaded.run([Chunk(PROMPT[:30], 0, [0, 1], False), Chunk(PROMPT[:3], 0, [5], True)]).copy()]
    rows.append(loaded.run([Chunk(PROMPT[30:], 30, [0, 1], True)]).copy())
    for i in range(6):
        rows.append(loaded.run([Chunk([PROMPT[i]], len(PROMPT) + i, [0, 1], True), Chunk([PROMPT[i + 7]], 3 + i, [5], True)]).copy())
    return np.concatenate(rows)


def slice_count(path: Path) -> int:
    with open_model(path) as model:
        return sum(info.shape[0] for towers in streaming.expert_layers(model) for info in towers)


def test_streamed_is_resident_bit_for_bit_with_any_number_of_slots(tiny_model) -> None:
    path = tiny_model(MODEL)
    with runner(path, slots=None) as loaded:
        resident = logits(loaded)
    assert np.isfinite(resident).all()
    total = slice_count(path)
    with open_model(path) as model:
        encodings = {info.encoding.name for towers in streaming.expert_layers(model) for info in towers}
        assert len({info.slice_bytes for towers in streaming.expert_layers(model) for info in towers}) > 1
    assert len(encodings) > 1
    for slots in range(1, total + 2):
        with runner(path, slots=slots, threads=1 + slots % 3) as loaded:
            assert np.array_equal(logits(loaded), resident), f"{slots} slots"
            stats = loaded.stats()["expert_stream"]
        assert stats["hits"] + stats["misses"] > 0
        assert stats["fills"] == stats["misses"] - stats["exhausted"]
        assert (stats["exhausted"] == 0) == (slots >= 3)
        streaming.forget_store()
        reset_documents()


def complete(llm: vllm_cpp.LLM) -> list[int]:
    return llm.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True).token_ids


def test_the_store_says_what_it_is_and_counts(tiny_model, monkeypatch, capfd) -> None:
    path = tiny_model(MODEL)
    monkeypatch.setenv("VT_MOE_EXPERT_STREAM_STATS_EVERY", "4")
    monkeypatch.setenv("VT_MOE_EXPERT_STREAM_LANES", "3")
    with vllm_cpp.load(path, threads=1) as llm:
        expected = complete(llm)
        assert llm.stats()["expert_stream"] is None
    streaming.forget_store()
    reset_documents()
    capfd.readouterr()
    with vllm_cpp.load(path, threads=1, offload_config=streamed(20)) as llm:
        assert complete(llm) == expected
        stats = llm.stats()["expert_stream"]
        assert "expert_stream" not in llm.stats()["runner"]
    assert {name: stats[name] for name in ("slots", "policy", "lanes", "steps", "exhausted")} == {
        "slots": 20, "policy": "next", "lanes": 3, "steps": 8, "exhausted": 0,
    }  # fmt: skip
    assert stats["hits"] + stats["misses"] > 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[expert-stream]")]
    assert lines[0] == f"[expert-stream] ON slots=20 slot_bytes={stats['slot_bytes']} resident={20 * stats['slot_bytes'] / 2**30:.2f} GiB"
    numbers = r"steps=(\d+) hits=\d+ misses=\d+ evictions=\d+ fills=\d+ bytes=\d+ exhausted=0 advised=0"
    assert [re.fullmatch(rf"\[expert-stream\] {numbers}", line)[1] for line in lines[1:]] == ["4", "8"]


def test_too_few_slots_are_said_once(tiny_model, capfd) -> None:
    with vllm_cpp.load(tiny_model(MODEL), threads=1, offload_config=streamed(2)) as llm:
        complete(llm)
        complete(llm)
    said = capfd.readouterr().err
    assert said.count("[expert-stream] slots=2 hold less than one token's working set, 12 slices") == 1
    assert said.count("[expert-stream] slices are read in place, without a slot: slots=2 were all in use, and one expert takes 3") == 1


def test_what_cannot_be_streamed_is_said_and_runs(tiny_model, monkeypatch, capfd) -> None:
    moe, dense = tiny_model(MODEL), tiny_model("qwen3-s1-z1-F32")

    def load(path: Path, **document: object) -> str:
        reset_documents()
        capfd.readouterr()
        with vllm_cpp.load(path, threads=1, offload_config={"vllm_cpp": {"expert_stream": {"enabled": True}, **document}}) as llm:
            complete(llm)
            assert llm.stats()["expert_stream"] is None
        return "".join(line for line in capfd.readouterr().err.splitlines() if line.startswith("[expert-stream]"))

    nothing = "[expert-stream] asked for, but nothing of {} is streamed: "
    assert load(dense) == nothing.format(dense) + "it has no routed experts"
    off = load(moe, mmap={"enabled": False})
    assert off.startswith(nothing.format(moe) + "mmap is off, so its experts were copied into memory; turn it on")
    small = load(moe, expert_stream={"enabled": True, "slot_bytes": 999})
    assert small == nothing.format(moe) + "no layer's slices fit slots of 999 bytes; its largest is 53760 bytes"
    family = dataclasses.replace(registry.find("qwen2moe"), streams_experts=False)
    monkeypatch.setitem(registry._FAMILIES, "qwen2moe", family)
    assert load(moe) == nothing.format(moe) + "the qwen2moe family does not read its experts through slots"


def test_layers_that_do_not_fit_the_slots_are_read_in_place(tmp_path, capfd) -> None:
    """One layer's down projection takes more bytes than all the others."""
    made = tiny_models.build("qwen2moe", dtype="Q8_0")
    name = "blk.1.ffn_down_exps.weight"
    shape = tuple(reversed(made.tensors.pop(name).dims))
    made.matrix(name, *shape, encoding="F16")
    path = made.write(tmp_path / "uneven.gguf")
    with open_model(path) as model:
        sizes = [max(info.slice_bytes for info in towers) for towers in streaming.expert_layers(model)]
    assert sizes[0] < sizes[1]
    with runner(path, slots=None) as loaded:
        resident = logits(loaded)
    reset_documents()
    with runner(path, slots=30, slot_bytes=sizes[0]) as loaded:
        assert np.array_equal(logits(loaded), resident)
        assert loaded.stats()["expert_stream"]["misses"] > 0
    assert (
        f"[expert-stream] 1 of {len(sizes)} routed layers are read in place: slices of up to {sizes[1]} bytes do not"
        in capfd.readouterr().err
    )


def test_a_slice_that_cannot_be_read_fails_its_request_by_name_and_the_engine_serves_on(tiny_model, tmp_path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model(MODEL).read_bytes())
    with vllm_cpp.load(path, threads=2, offload_config=streamed(20)) as llm:
        expected = complete(llm)
    data = path.read_bytes()
    with open_model(path) as model:
        down = max(streaming.expert_layers(model)[-1], key=lambda info: info.file_offset)
    with vllm_cpp.load(path, threads=2, offload_config=streamed(20)) as llm:
        # The file loses its tail while nothing of it is mapped into the arena; dense weights before it are whole.
        os.truncate(path, down.file_offset + 8)
        try:
            with pytest.raises(GenerationError) as caught:
                complete(llm)
            assert re.search(
                rf"model\.gguf: expert \d+ of tensor '{down.name}' \(\d+ bytes at byte \d+\) cannot be read: the file ends at byte "
                rf"{down.file_offset + 8}, it has become shorter",
                str(caught.value),
            )
        finally:
            with path.open("r+b") as file:
                file.write(data)
        assert complete(llm) == expected


@pytest.mark.parametrize(("room", "reads"), [(None, "buffered"), (-1, "direct"), (0, "buffered")])
def test_reads_pass_the_page_cache_where_it_has_no_room_for_the_experts_beside_the_arena(tiny_model, monkeypatch, room, reads) -> None:
    path = tiny_model(MODEL)
    with open_model(path) as model:
        layers = streaming.expert_layers(model)
        experts = sum(info.n_bytes for towers in layers for info in towers)
        arena = 30 * cell_bytes(max(info.slice_bytes for towers in layers for info in towers))
    monkeypatch.setattr(streaming, "available_bytes", lambda: None if room is None else experts + arena + room)
    with runner(path, slots=30) as loaded:
        assert loaded.stats()["expert_stream"]["reads"] == reads
        monkeypatch.setenv("VT_MOE_EXPERT_STREAM_DIRECT", "0" if reads == "direct" else "1")
        with runner(path, slots=30) as other:
            assert other._stream.reads_directly is (reads != "direct")


def test_engines_share_the_store_and_its_geometry_is_frozen(tiny_model, capfd) -> None:
    path = tiny_model(MODEL)
    with vllm_cpp.load(path, threads=1, offload_config=streamed(30)) as first:
        expected = complete(first)
        with pytest.raises(ModelLoadError, match=r"expert_stream_slots cannot be changed .*in force: expert_stream_slots=30"):
            vllm_cpp.load(path, threads=1, offload_config=streamed(31))
        with vllm_cpp.load(path, threads=1) as second:
            results: dict[int, list[int]] = {}
            threads = [
                threading.Thread(target=lambda i=i, llm=llm: results.update({i: complete(llm)})) for i, llm in enumerate([first, second])
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert results == {0: expected, 1: expected}
    assert capfd.readouterr().err.count("[expert-stream] ON") == 1


def test_loading_and_closing_leaves_nothing_behind(tiny_model) -> None:
    path = tiny_model(MODEL)
    for _ in range(3):
        with vllm_cpp.load(path, threads=1, offload_config=streamed(30)) as llm:
            complete(llm)
    store = streaming._process.store
    assert (store.occupied, store.in_use) == (0, 0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        vllm_cpp.load(path, threads=1).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


HOST = """
import sys, vllm_cpp
with vllm_cpp.load(sys.argv[1], threads=1) as llm:
    if sys.argv[2] == "run":
        llm.generate([1, 2, 3], max_tokens=4, temperature=0, ignore_eos=True)
    if sys.argv[2] == "leave":
        sys.exit()  # with the engine open
"""


@pytest.mark.parametrize(("what", "steps"), [("run", 4), ("nothing", 0), ("leave", 0)])
def test_a_python_process_ends_with_one_last_line(tiny_model, what: str, steps: int) -> None:
    environment = {**os.environ, "VT_MOE_EXPERT_STREAM": "1", "VT_MOE_EXPERT_STREAM_STATS_EVERY": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", HOST, str(tiny_model(MODEL)), what], capture_output=True, text=True, check=True, env=environment
    )  # fmt: skip
    lines = [line for line in ran.stderr.splitlines() if line.startswith("[expert-stream] steps=")]
    assert len(lines) == 1
    assert lines[0].startswith(f"[expert-stream] steps={steps} hits=")
    assert ran.stderr.rstrip().endswith(lines[0])


def test_a_process_without_a_store_ends_without_a_line(tiny_model) -> None:
    environment = {**os.environ, "VT_MOE_EXPERT_STREAM": "1"}
    command = [sys.executable, "-c", HOST, str(tiny_model("qwen3-s1-z1-F32")), "run"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "steps=" not in ran.stderr


def test_the_command_line_reports_what_was_streamed(tiny_model) -> None:
    command = [sys.executable, "-m", "vllm_cpp.cli", "--model", str(tiny_model(MODEL)), "--prompt", "Hello", "--max-tokens", "3", "--json"]
    ran = subprocess.run([*command, "--expert-stream", "50"], capture_output=True, text=True, check=True)
    report = json.loads(ran.stdout)["expert_stream"]
    assert report["slots"] == 50
    assert report["fills"] == report["misses"] > 0
    assert ran.stderr.count("[expert-stream] ON slots=50") == 1
    assert ran.stderr.count(f"[expert-stream] steps={report['steps']} hits={report['hits']} ") == 1
