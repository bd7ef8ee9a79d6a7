"""Device fit: what staging needs, against which budget, which files the streaming lane serves, and the exact words of the refusal."""

from __future__ import annotations

import pytest

from inventories import CARD, GIB, INTEGRATED, READS_IN_PLACE, UNPROBED, inventory, weight
from vllm_cpp import env
from vllm_cpp.config.offload import install, parse, resolve
from vllm_cpp.config.offload.install import reset
from vllm_cpp.residency.device_fit import Lane, budget_of, gib, keeps_file_form, lane_for, need_of, refusal, staged_bytes
from vllm_cpp.residency.devices import CPU
from vllm_cpp.residency.inventory import Inventory

NO_LANE = Lane("expert streaming is off")


def of(*weights) -> Inventory:
    return Inventory(architecture="qwen3moe", num_layers=1, weights=weights, top_k={0: 2})


@pytest.mark.parametrize(
    ("encoding", "n_bytes"),
    [
        ("F32", 2 * 256 * 64),
        ("F16", 2 * 256 * 64),
        ("BF16", 2 * 256 * 64),
        ("Q8_0", 34 * 8 * 64),
        ("Q4_K", 144 * 64),
        ("F64", 2 * 256 * 64),
    ],
)
def test_a_weight_is_staged_as_the_file_holds_it_or_in_16_bits_if_that_is_less(encoding, n_bytes):
    assert staged_bytes(weight("output.weight", 64, 256, encoding=encoding)) == n_bytes


def test_the_need_is_a_sum_with_its_largest_part():
    need = need_of(
        of(weight("token_embd.weight", 64, 256), weight("blk.0.ffn_up_exps.weight", 8, 64, 256), weight("output.weight", 64, 256)),
        lane=NO_LANE,
    )
    assert (need.total_bytes, need.num_tensors) == (10 * 64 * 144, 3)
    assert (need.largest_bytes, need.largest_name) == (8 * 64 * 144, "blk.0.ffn_up_exps.weight")


def test_layers_placed_on_the_cpu_are_not_staged():
    items = inventory("deepseek2")
    whole, part = need_of(items, lane=NO_LANE), need_of(items, lane=NO_LANE, placed=(1, 4))
    assert whole.num_tensors - part.num_tensors == 6
    assert whole.total_bytes - part.total_bytes == 6 * 8 * 256 * 144


class TestBudget:
    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch):
        for name in env.ROWS:
            monkeypatch.delenv(name, raising=False)
        reset()

    @pytest.mark.parametrize(
        ("document", "variable", "budget"),
        [
            (None, None, CARD.total_bytes),
            (5, None, 5),
            (0, None, 0),
            (5, "7", 7),
            (5, "0", 0),
            *[(5, typo, 5) for typo in ("", " 7", "7 ", "+7", "-0", "7G", "7.0", "٧")],
            (None, "7x", CARD.total_bytes),
        ],
    )
    def test_variable_then_document_then_probe(self, monkeypatch, document, variable, budget):
        if variable is not None:
            monkeypatch.setenv("VT_DEVICE_WEIGHT_BUDGET_BYTES", variable)
        install(parse({"vllm_cpp": {"device_fit": {"weight_budget_bytes": document}}}))
        assert budget_of(CARD, resolve().device_weight_budget_bytes) == budget
        reset()

    def test_nothing_known(self):
        assert budget_of(UNPROBED, None) is None
        assert budget_of(UNPROBED, 9) == 9


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0.00 GiB"),
        (GIB, "1.00 GiB"),
        (GIB - 1, "0.99 GiB"),
        (128452956160, "119.63 GiB"),
        (2**63, "8589934592.00 GiB"),
        (3 << 29, "1.50 GiB"),
    ],
)
def test_a_size_is_cut_and_not_rounded(n_bytes, text):
    assert gib(n_bytes) == text


class TestRefusal:
    ITEMS = of(weight("output.weight", 64, 256), weight("blk.0.ffn_up_exps.weight", 8, 64, 256))
    NEED = need_of(ITEMS, lane=NO_LANE)

    def test_its_words(self):
        assert refusal(CARD, 80000, self.NEED, NO_LANE) == (
            "device 'cuda' cannot serve this GGUF: staging its weights needs at least 82944 bytes (0.00 GiB) of device memory across 2 "
            "tensors, the largest single allocation being 73728 bytes (0.00 GiB, 'blk.0.ffn_up_exps.weight'), and this device's memory "
            "pool is 80000 bytes (0.00 GiB). THE MISSING PART: for this load there is no device-side expert slot store and no device "
            "streaming lane: expert streaming is off. Use device=cpu, which serves this checkpoint today, or a checkpoint that fits the "
            'pool. VT_DEVICE_WEIGHT_BUDGET_BYTES, or "vllm_cpp.device_fit.weight_budget_bytes" in the offload document, moves the '
            "budget, and 0 suppresses this refusal: the load then fails later, it does not fit"
        )

    def test_it_is_about_exceeding_the_budget(self):
        assert refusal(CARD, self.NEED.total_bytes, self.NEED, NO_LANE) is None
        assert refusal(CARD, self.NEED.total_bytes - 1, self.NEED, NO_LANE) is not None

    @pytest.mark.parametrize("device", [CPU, READS_IN_PLACE])
    def test_a_device_that_stages_nothing_is_never_refused(self, device):
        assert refusal(device, 1, self.NEED, NO_LANE) is None

    @pytest.mark.parametrize("budget", [None, 0])
    def test_an_unknown_budget_and_one_of_zero_are_no_verdict(self, budget):
        assert refusal(CARD, budget, self.NEED, NO_LANE) is None

    def test_with_the_lane_on_the_remainder_and_the_arena_are_what_does_not_fit(self):
        need = need_of(self.ITEMS, lane=Lane(), arena_bytes=5000)
        text = refusal(INTEGRATED, 14215, need, Lane())
        assert text is not None
        assert "needs at least 14216 bytes (0.00 GiB) of device memory across 1 tensors" in text
        assert "largest single allocation being 9216 bytes (0.00 GiB, 'output.weight')" in text
        assert (
            "THE MISSING PART: not the device streaming lane, which is on: 1 expert towers (73728 bytes, 0.00 GiB) are left out above and "
            "the slot arena (5000 bytes, 0.00 GiB) is counted instead; fewer slots shrink the arena" in text
        )
        assert refusal(INTEGRATED, 14216, need, Lane()) is None


class TestLane:
    def lane(self, items=None, device=INTEGRATED, **conditions):
        return lane_for(items or inventory("qwen3moe"), device, **{"expert_stream": True, "family_streams": True, **conditions})

    def test_all_conditions_hold(self):
        assert self.lane().serves
        assert self.lane(inventory("qwen3moe", encoding="F16")).serves
        assert self.lane(inventory("qwen35moe", encoding="MXFP4")).serves

    @pytest.mark.parametrize(
        ("conditions", "missing"),
        [
            ({"device": CARD}, "cuda cannot read host memory in place"),
            ({"expert_stream": False}, "expert streaming is off"),
            ({"family_streams": False}, 'architecture "qwen3moe" does not read its experts through slots'),
            ({"keep_quant": False}, "'blk.0.ffn_gate_exps.weight' is Q4_K, which is not kept in the file's form"),
            ({"items": inventory("llama")}, "the model has no routed experts"),
        ],
    )
    def test_one_that_does_not(self, conditions, missing):
        lane = self.lane(**conditions)
        assert (lane.serves, lane.missing) == (False, missing)

    @pytest.mark.parametrize("encoding", ["F32", "BF16", "NVFP4"])
    def test_one_staged_tower_keeps_the_whole_bound(self, encoding):
        mixed = inventory("qwen3moe", ffn_down_exps=encoding)
        lane = self.lane(mixed)
        assert lane.missing == f"'blk.0.ffn_down_exps.weight' is {encoding}, which is not kept in the file's form"
        assert need_of(mixed, lane=lane, arena_bytes=1).num_streamed == 0

    def test_what_has_to_fit_is_the_remainder_and_the_arena(self):
        items = inventory("qwen3moe")
        need = need_of(items, lane=self.lane(), arena_bytes=1000)
        dense = sum(staged_bytes(one) for one in items.weights if not one.num_experts)
        assert need.total_bytes == dense + 1000
        assert (need.num_streamed, need.streamed_bytes) == (12, 12 * 8 * 256 * 144)
        assert need_of(inventory("llama"), lane=Lane(), arena_bytes=1000).arena_bytes == 0

    def test_without_kept_blocks_only_f16_keeps_its_form(self):
        assert keeps_file_form("F16", keep_quant=False)
        assert not keeps_file_form("Q4_K", keep_quant=False)
