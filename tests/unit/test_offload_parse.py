"""The offload document: what it accepts, and the exact words and order of every refusal."""

from __future__ import annotations

import json
import math

import pytest

from vllm_cpp.config.offload import OffloadDocument, Override, ResidencyRequest, WeightOffload, parse
from vllm_cpp.errors import InvalidArgumentError

FULL = {
    "offload_backend": "uva",
    "uva": {"cpu_offload_gb": 2.5, "cpu_offload_params": ["experts", "w2", "experts"]},
    "prefetch": {"offload_group_size": 8, "offload_num_in_group": 2, "offload_prefetch_step": 3, "offload_params": ["q"]},
    "vllm_cpp": {
        "mmap": {"enabled": True, "prefault": False},
        "expert_stream": {"enabled": True, "slots": 4000, "slot_bytes": 1 << 20},
        "device_fit": {"weight_budget_bytes": 0},
        "placement": {"overrides": [{"pattern": r"blk\.0\..*ffn_.*_exps", "device": "cpu"}], "cpu_moe": True, "n_cpu_moe": 3, "fit": False},
    },
}


def refused(document) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(document)
    return str(caught.value)


def nested(dotted: str, value: object) -> dict:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize("form", [FULL, json.dumps(FULL), json.dumps(FULL).encode()], ids=["dict", "text", "bytes"])
def test_every_field_arrives(form):
    assert parse(form) == OffloadDocument(
        residency=ResidencyRequest(
            mmap=True,
            prefault=False,
            expert_stream=True,
            expert_stream_slots=4000,
            expert_stream_slot_bytes=1 << 20,
            device_weight_budget_bytes=0,
            cpu_moe=True,
            n_cpu_moe=3,
            placement_fit=False,
            placement_overrides=(Override(r"blk\.0\..*ffn_.*_exps", "cpu"),),
        ),
        weight_offload=WeightOffload(
            backend="uva",
            cpu_offload_gb=2.5,
            cpu_offload_params=frozenset({"experts", "w2"}),
            group_size=8,
            num_in_group=2,
            prefetch_step=3,
            prefetch_params=frozenset({"q"}),
        ),
    )


@pytest.mark.parametrize("inert", [None, "", " \t\r\n", "{}", {}, '{"vllm_cpp":null,"uva":null,"prefetch":null,"offload_backend":null}'])
def test_an_inert_document(inert):
    document = parse(inert)
    assert document == OffloadDocument()
    assert document.residency.described() == ""
    assert not document.weight_offload.enabled


def test_null_is_absent_and_an_empty_list_is_not():
    absent = parse({"vllm_cpp": {"mmap": {"enabled": None}, "placement": {"overrides": None, "cpu_moe": None}}})
    assert absent.residency.said() == {}
    assert parse({"vllm_cpp": {"placement": {"overrides": []}}}).residency.said() == {"placement_overrides": ()}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "offload config: malformed JSON: "),
        ("{} x", "offload config: malformed JSON: "),
        ("\x00", "offload config: malformed JSON: "),
        ('{"vllm_cpp":{"mmap":{"enabled":tr\x00ue}}}', "offload config: malformed JSON: "),
        ('{"uva":{"cpu_offload_gb":NaN}}', "offload config: malformed JSON: NaN is not a JSON value"),
        ('{"uva":{"cpu_offload_gb":-Infinity}}', "offload config: malformed JSON: -Infinity is not a JSON value"),
        (b'{"offload_backend":"\xff"}', "offload config: malformed JSON: the text is not valid UTF-8"),
        ('{"offload_backend":"\udcff"}', "offload config: malformed JSON: the text is not valid UTF-8"),
        ("[" * 100_000, "offload config: malformed JSON: nested too deeply"),
        (" " * (1 << 20) + "{}", "offload config: malformed JSON: 1048578 bytes, and a document may have 1048576"),
        ("[]", "offload config: must be a JSON object"),
        ("3", "offload config: must be a JSON object"),
        ('"{}"', "offload config: must be a JSON object"),
        ("null", "offload config: must be a JSON object"),
        (3, "offload config: must be JSON text or a dict, not 3"),
    ],
)
def test_what_is_no_object(text, says):
    assert refused(text).startswith(says)


UNKNOWN = {
    "": "offload_backend uva prefetch vllm_cpp",
    "uva": "cpu_offload_gb cpu_offload_params",
    "prefetch": "offload_group_size offload_num_in_group offload_prefetch_step offload_params",
    "vllm_cpp": "mmap expert_stream device_fit placement",
    "vllm_cpp.mmap": "enabled prefault",
    "vllm_cpp.expert_stream": "enabled slots slot_bytes",
    "vllm_cpp.device_fit": "weight_budget_bytes",
    "vllm_cpp.placement": "overrides cpu_moe n_cpu_moe fit",
}


@pytest.mark.parametrize(("path", "names"), UNKNOWN.items())
def test_an_unknown_key_is_named_with_its_whole_path(path, names):
    dotted = f"{path}.typo" if path else "typo"
    assert refused(nested(dotted, 1)) == f'offload config: unknown key "{dotted}" (expected one of: {names})'
    assert refused(json.dumps(nested(dotted, None))) == f'offload config: unknown key "{dotted}" (expected one of: {names})'


def test_the_likeliest_typos():
    assert refused('{"vllm-cpp":{}}') == 'offload config: unknown key "vllm-cpp" (expected one of: offload_backend uva prefetch vllm_cpp)'
    assert refused('{"uva":{"cpu_offload_GB":10}}').startswith('offload config: unknown key "uva.cpu_offload_GB"')
    assert refused(nested("vllm_cpp.expert_stream.stats_every", 1)).startswith(
        'offload config: unknown key "vllm_cpp.expert_stream.stats_every"'
    )


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        *[(path, 5, f'"{path}" must be a JSON object') for path in UNKNOWN if path],
        ("vllm_cpp", [], '"vllm_cpp" must be a JSON object'),
        *[
            (path, value, f'"{path}" must be a boolean')
            for path in ("vllm_cpp.mmap.enabled", "vllm_cpp.mmap.prefault", "vllm_cpp.expert_stream.enabled")
            for value in (0, 1, "true", [])
        ],
        ("vllm_cpp.placement.cpu_moe", 1, '"vllm_cpp.placement.cpu_moe" must be a boolean'),
        ("vllm_cpp.placement.fit", "on", '"vllm_cpp.placement.fit" must be a boolean'),
        *[
            (path, value, f'"{path}" must be an integer')
            for path in (
                "vllm_cpp.expert_stream.slots",
                "vllm_cpp.expert_stream.slot_bytes",
                "vllm_cpp.device_fit.weight_budget_bytes",
                "vllm_cpp.placement.n_cpu_moe",
            )
            for value in (8000.0, "8000", True, math.nan, math.inf, [])
        ],
        ("vllm_cpp.expert_stream.slots", 0, '"vllm_cpp.expert_stream.slots" must be positive (got 0)'),
        ("vllm_cpp.expert_stream.slots", -4, '"vllm_cpp.expert_stream.slots" must be positive (got -4)'),
        ("vllm_cpp.expert_stream.slot_bytes", 0, '"vllm_cpp.expert_stream.slot_bytes" must be positive (got 0)'),
        (
            "vllm_cpp.device_fit.weight_budget_bytes",
            -1,
            '"vllm_cpp.device_fit.weight_budget_bytes" must not be negative (got -1); 0 means "suppress the device-fit refusal"',
        ),
        ("vllm_cpp.placement.n_cpu_moe", -1, '"vllm_cpp.placement.n_cpu_moe" must not be negative (got -1)'),
        ("vllm_cpp.placement.n_cpu_moe", 4097, '"vllm_cpp.placement.n_cpu_moe" must not be above 4096 (got 4097)'),
        ("vllm_cpp.expert_stream.slots", 2**63, f'"vllm_cpp.expert_stream.slots" must fit in 64 bits (got {2**63})'),
        ("vllm_cpp.placement.overrides", {}, '"vllm_cpp.placement.overrides" must be an array of objects'),
        ("vllm_cpp.placement.overrides", "a=cpu", '"vllm_cpp.placement.overrides" must be an array of objects'),
        ("offload_backend", 3, '"offload_backend" must be a string'),
        ("offload_backend", "disk", 'unknown offload_backend "disk" (expected auto, uva or prefetch)'),
        ("uva.cpu_offload_gb", "1", '"cpu_offload_gb" must be a number'),
        ("uva.cpu_offload_gb", True, '"cpu_offload_gb" must be a number'),
        ("uva.cpu_offload_params", "experts", '"cpu_offload_params" must be an array of strings'),
        ("uva.cpu_offload_params", ["a", 1], '"cpu_offload_params" must be an array of strings'),
        ("prefetch.offload_group_size", 2.0, '"offload_group_size" must be an integer'),
        ("prefetch.offload_num_in_group", "1", '"offload_num_in_group" must be an integer'),
        ("prefetch.offload_prefetch_step", False, '"offload_prefetch_step" must be an integer'),
        ("prefetch.offload_params", {}, '"offload_params" must be an array of strings'),
    ],
)
def test_a_value_of_the_wrong_kind(path, value, says):
    assert refused(nested(path, value)) == f"offload config: {says}"


OVERRIDES = "vllm_cpp.placement.overrides"


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (3, f'"{OVERRIDES}[1]" must be an object with "pattern" and "device"'),
        ("a=cpu", f'"{OVERRIDES}[1]" must be an object with "pattern" and "device"'),
        ({"pattern": "a", "devise": "cpu"}, f'unknown key "{OVERRIDES}[1].devise" (expected one of: pattern device)'),
        ({}, f'"{OVERRIDES}[1].pattern" must be a non-empty string'),
        ({"pattern": "", "device": "cpu"}, f'"{OVERRIDES}[1].pattern" must be a non-empty string'),
        ({"pattern": "a"}, f'"{OVERRIDES}[1].device" must be a non-empty string'),
        ({"pattern": "a", "device": None}, f'"{OVERRIDES}[1].device" must be a non-empty string'),
        (
            {"pattern": "(", "device": "cpu"},
            f'"{OVERRIDES}[1].pattern" is not a valid regex: missing ), unterminated subpattern at position 0',
        ),
        (
            {"pattern": "a{99999999999}", "device": "cpu"},
            f'"{OVERRIDES}[1].pattern" is not a valid regex: the repetition number is too large',
        ),
        ({"pattern": "(" * 1024, "device": "cpu"}, f'"{OVERRIDES}[1].pattern" is not a valid regex: '),
        ({"pattern": "a" * 1025, "device": "cpu"}, f'"{OVERRIDES}[1].pattern" is not a valid regex: 1025 characters'),
        ({"pattern": "a", "device": "tpu"}, f'"{OVERRIDES}[1].device" is "tpu", which is not a device (expected one of: cpu cuda)'),
        ({"pattern": "a", "device": "cuda"}, f'"{OVERRIDES}[1].device" is "cuda", and a placement target must be cpu'),
    ],
)
def test_an_override_is_checked_by_its_index(item, says):
    assert refused(nested(OVERRIDES, [{"pattern": "a", "device": "cpu"}, item])).startswith(f"offload config: {says}")


@pytest.mark.parametrize("manual", [{"cpu_moe": True}, {"n_cpu_moe": 1}, {"overrides": [{"pattern": "a", "device": "cpu"}]}])
def test_fit_excludes_a_manual_placement(manual):
    text = '"vllm_cpp.placement.fit" cannot be combined with a manual placement ("overrides", "cpu_moe" or "n_cpu_moe")'
    assert refused({"vllm_cpp": {"placement": {"fit": True, **manual}}}) == f"offload config: {text}"
    parse({"vllm_cpp": {"placement": {"fit": False, **manual}}})


def test_fit_beside_a_manual_placement_of_nothing():
    assert parse({"vllm_cpp": {"placement": {"fit": True, "overrides": [], "cpu_moe": False, "n_cpu_moe": 0}}}).residency.placement_fit


def test_mistakes_are_named_in_the_order_of_the_contract():
    document = {
        "typo": 1,
        "uva": {"typo": 1, "cpu_offload_gb": "x"},
        "prefetch": {"typo": 1, "offload_group_size": -1},
        "vllm_cpp": {"mmap": {"typo": 1}, "expert_stream": {"slots": 0}},
        "offload_backend": "disk",
    }
    named = []
    for fix in (
        lambda: document.pop("typo"),
        lambda: document["uva"].pop("typo"),
        lambda: document["prefetch"].pop("typo"),
        lambda: document["vllm_cpp"]["mmap"].pop("typo"),
        lambda: document["vllm_cpp"]["expert_stream"].pop("slots"),
        lambda: document.pop("offload_backend"),
        lambda: document["uva"].pop("cpu_offload_gb"),
        lambda: document["prefetch"].pop("offload_group_size"),
    ):
        named.append(refused(json.dumps(document)))
        fix()
    parse(document)
    for text, word in zip(
        named,
        ['"typo"', '"uva.typo"', '"prefetch.typo"', '"vllm_cpp.mmap.typo"', "slots", "disk", "cpu_offload_gb", "offload_group_size"],
        strict=True,
    ):
        assert word in text


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"uva":{},"uva":{}}', "uva"),
        ('{"vllm_cpp":{"mmap":{"enabled":true,"prefault":true,"enabled":false}}}', "vllm_cpp.mmap.enabled"),
        (
            '{"vllm_cpp":{"placement":{"overrides":[{"pattern":"a","pattern":"b","device":"cpu"}]}}}',
            "vllm_cpp.placement.overrides[0].pattern",
        ),
    ],
)
def test_a_key_given_twice_is_refused(text, path):
    assert refused(text) == f'offload config: duplicate key "{path}"'


@pytest.mark.parametrize("digits", [30, 400, 5000, 500_000])
def test_a_huge_integer_names_its_path(digits):
    text = refused('{"vllm_cpp":{"expert_stream":{"slots":' + "9" * digits + "}}}")
    assert text.startswith('offload config: "vllm_cpp.expert_stream.slots" must ')
    assert len(text) < 200
    if digits > 308:  # beyond what a float can hold
        assert refused('{"uva":{"cpu_offload_gb":1' + "0" * digits + "}}") == "cpu_offload_gb (inf) must be finite"
    assert '"vllm_cpp.expert_stream.slots" must ' in refused(nested("vllm_cpp.expert_stream.slots", 10**digits))


def test_a_strange_key_stays_printable():
    text = refused({'a"b\n\x00\ud800' + "x" * 1000: 1})
    assert text.startswith(r'offload config: unknown key "a\"b\n\u0000\\ud800xxx')
    assert len(text) < 300
    assert text.encode()
    assert '"7"' in refused({7: 1})


def test_a_dict_that_contains_itself_is_refused():
    document: dict = {}
    document["vllm_cpp"] = document
    assert refused(document) == 'offload config: unknown key "vllm_cpp.vllm_cpp" (expected one of: mmap expert_stream device_fit placement)'


def test_the_start_up_line_lists_what_was_said_in_its_order():
    assert parse(FULL).residency.described() == (
        "mmap=on prefault=off expert_stream=on expert_stream_slots=4000 expert_stream_slot_bytes=1048576 "
        "device_weight_budget_bytes=0 cpu_moe=on n_cpu_moe=3 placement_fit=off placement_overrides=1"
    )
    assert parse(nested("vllm_cpp.mmap.prefault", False)).residency.described() == "prefault=off"
    assert parse(nested(OVERRIDES, [])).residency.described() == "placement_overrides=0"


def test_the_manual_placement_desugars_first_match_first():
    request = ResidencyRequest(placement_overrides=(Override("a", "cpu"),), cpu_moe=True, n_cpu_moe=2)
    assert [override.pattern for override in request.desugared()] == [
        "a",
        r"\.ffn_(up|down|gate|gate_up)_(ch|)exps",
        r"blk\.0\.ffn_(up|down|gate|gate_up)_(ch|)exps",
        r"blk\.1\.ffn_(up|down|gate|gate_up)_(ch|)exps",
    ]
