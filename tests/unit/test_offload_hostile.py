"""Ten thousand documents with one mistake each, at a place that the test knows: the refusal names that place. And some made to hurt."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import pytest

from vllm_cpp.config.offload import parse
from vllm_cpp.config.offload.keys import KEYS, children
from vllm_cpp.errors import InvalidArgumentError

Path = tuple[str | int, ...]

GOOD: dict[str, list[Any]] = {
    "offload_backend": ["auto", "uva", "prefetch", None],
    "uva.cpu_offload_gb": [0, 1, 2.5, 1e-9, None],
    "uva.cpu_offload_params": [[], ["experts", "w2"], None],
    "prefetch.offload_group_size": [8, 4],
    "prefetch.offload_num_in_group": [1, 4, None],
    "prefetch.offload_prefetch_step": [1, 9, None],
    "prefetch.offload_params": [[], ["q"], None],
    "vllm_cpp.mmap.enabled": [True, False, None],
    "vllm_cpp.mmap.prefault": [True, False, None],
    "vllm_cpp.expert_stream.enabled": [True, False, None],
    "vllm_cpp.expert_stream.slots": [1, 4000, 2**63 - 1, None],
    "vllm_cpp.expert_stream.slot_bytes": [1, 1 << 30, None],
    "vllm_cpp.device_fit.weight_budget_bytes": [0, 1, 2**63 - 1, None],
    "vllm_cpp.placement.overrides": [[], [{"pattern": "a+", "device": "cpu"}] * 3, None],
    "vllm_cpp.placement.cpu_moe": [True, False, None],
    "vllm_cpp.placement.n_cpu_moe": [0, 4096, None],
    "vllm_cpp.placement.fit": [False, None],
}
ANYTHING = [
    True,
    False,
    0,
    1,
    -1,
    0.0,
    -0.5,
    8000.0,
    2**31,
    2**63,
    10**40,
    "",
    "1",
    "cpu",
    "\x00",
    "\ud800",
    [],
    [0],
    [[]],
    [{}],
    {},
    {"a": 1},
]
ANYTHING += [math.nan, math.inf, -math.inf, ["a"], [None], "x" * 5000]
# Of a kind, what is right anyway; everything else of ANYTHING is a mistake.
RIGHT: dict[str, Any] = {
    "string": lambda value: value in ("auto", "uva", "prefetch"),
    "number": lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    "array of strings": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "boolean": lambda value: isinstance(value, bool),
    "array of objects": lambda value: value == [],
}
SMALLEST = {"slots": 1, "slot_bytes": 1, "offload_num_in_group": 1, "offload_prefetch_step": 1}
LARGEST = {"n_cpu_moe": 4096, "offload_num_in_group": 4}


def is_right(path: str, kind: str, value: Any) -> bool:
    if kind != "integer":
        return RIGHT[kind](value)
    name = path.rpartition(".")[2]
    if path == "prefetch.offload_group_size" and value in (0, 1):  # right or not by what stands beside it
        return True
    return type(value) is int and SMALLEST.get(name, 0) <= value <= LARGEST.get(name, 2**63 - 1)


def put(document: dict, path: str, value: Any) -> None:
    *groups, key = path.split(".")
    for group in groups:
        document = document.setdefault(group, {})
    document[key] = value


def a_good_one(rng: random.Random) -> dict:
    document: dict = {}
    for path, values in GOOD.items():
        if rng.random() < 0.6 or path == "prefetch.offload_group_size":
            put(document, path, rng.choice(values))
    return document


def refused(document: Any) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(document)
    text = str(caught.value)
    assert len(text) < 1000
    text.encode()
    return text


def named(path: str) -> str:
    """As a refusal names the path: vLLM's half by the bare key, as vLLM does."""
    return path if path.startswith("vllm_cpp") else path.rpartition(".")[2]


def as_given(rng: random.Random, document: dict) -> Any:
    """The document as a dict or, where JSON can say it, as text."""
    if rng.random() < 0.5:
        return document
    try:
        return json.dumps(document, allow_nan=False)
    except ValueError:
        return document


def test_the_table_is_complete():
    assert set(GOOD) == {key.path for key in KEYS if "[]" not in key.path}


def test_a_good_document_is_accepted():
    rng = random.Random(1)
    for _ in range(1000):
        parse(as_given(rng, a_good_one(rng)))


def test_a_wrong_value_is_named_by_its_path():
    rng = random.Random(2)
    kinds = {key.path: key.kind for key in KEYS if "[]" not in key.path}
    for _ in range(7000):
        document, path = a_good_one(rng), rng.choice(list(kinds))
        value = rng.choice(ANYTHING)
        if is_right(path, kinds[path], value):
            continue
        put(document, path, value)
        text = refused(as_given(rng, document))
        assert named(path) in text, (path, value, text)


def objects(document: dict, path: str = "") -> list[tuple[str, dict]]:
    found = [(path, document)]
    for key, value in document.items():
        if isinstance(value, dict):
            found += objects(value, f"{path}.{key}" if path else key)
    return found


def test_an_unknown_key_is_named_by_its_path():
    rng = random.Random(3)
    for _ in range(2000):
        document = a_good_one(rng)
        path, where = rng.choice(objects(document))
        known = rng.choice(children(path))
        typo = rng.choice(
            [known.upper(), known + "s", known[:-1], known.replace("_", "-") + "-", "", " " + known, "é", "a" * 3000, known + "\x00"]
        )
        where[typo] = rng.choice([None, 1, {}])
        shown = json.dumps(typo, ensure_ascii=False)[1:-1][:100]
        text = refused(as_given(rng, document))
        assert text.startswith(f'offload config: unknown key "{path}{"." if path else ""}{shown}'), (path, typo, text)


def test_a_wrong_override_is_named_by_its_index():
    rng = random.Random(4)
    for _ in range(2000):
        items: list[Any] = [{"pattern": "a", "device": "cpu"} for _ in range(rng.randrange(1, 6))]
        index, key = rng.randrange(len(items)), rng.choice(["pattern", "device", "", "other"])
        is_pattern = key == "pattern"
        wrong = rng.choice([value for value in ANYTHING if not (isinstance(value, str) and value and (is_pattern or value == "cpu"))])
        items = copy.deepcopy(items)
        if key:
            items[index][key] = wrong
        elif isinstance(wrong, dict) and not wrong:
            items[index] = 3
        else:
            items[index] = wrong
        path = f"vllm_cpp.placement.overrides[{index}]" + (f".{key}" if key else "")
        text = refused(as_given(rng, {"vllm_cpp": {"placement": {"overrides": items}}}))
        assert f'"{path}' in text, (items, text)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ('{"vllm_cpp":' * 80_000, "malformed JSON: nested too deeply"),
        ('{"vllm_cpp":{"mmap":' + "[" * 50_000 + "]" * 50_000 + "}}", "malformed JSON: nested too deeply"),
        ('{"a":1,' * 50_000, "malformed JSON: "),
        ('{"' + "k" * 900_000 + '":1}', 'unknown key "kkk'),
        ('{"uva":{"cpu_offload_params":[' + '"w",' * 200_000 + "1]}}", '"cpu_offload_params" must be an array of strings'),
        (
            '{"vllm_cpp":{"placement":{"overrides":[' + "{}," * 300_000 + "{}]}}}",
            '"vllm_cpp.placement.overrides" must not hold more than 256',
        ),
        ('{"vllm_cpp":{"expert_stream":{"slots":' + "9" * 900_000 + "}}}", '"vllm_cpp.expert_stream.slots" must be an integer'),
        ('{"uva":{"cpu_offload_gb":1e' + "9" * 900_000 + "}}", "cpu_offload_gb (inf) must be finite"),
        ('{"vllm_cpp":{"device_fit":{"weight_budget_bytes":-0.0}}}', '"vllm_cpp.device_fit.weight_budget_bytes" must be an integer'),
        ("{" + ",".join(f'"k{n}":0' for n in range(60_000)) + "}", 'unknown key "k0"'),
        ("{" + '"uva":{},' * 60_000 + '"uva":{}}', 'duplicate key "uva"'),
        ("x" * (1 << 24), "malformed JSON: 16777216 bytes, and a document may have 1048576"),
        (b"\xff\xfe{\x00}\x00", "malformed JSON: the text is not valid UTF-8"),
        (b"\xef\xbb\xbf{}", "malformed JSON: "),
        ('{"uva"\x00:{}}', "malformed JSON: "),
        ('{"vllm_cpp\x00":{}}', "malformed JSON: "),
        (r'{"vllm_cpp\u0000":{}}', r'unknown key "vllm_cpp\u0000"'),
        (r'{"\ud800":{}}', r'unknown key "\\ud800"'),
        ('{"offload_backend":Infinity}', "malformed JSON: Infinity is not a JSON value"),
        ('{"offload_backend":"' + "d" * 900_000 + '"}', 'unknown offload_backend "ddd'),
        (
            json.dumps({"vllm_cpp": {"placement": {"overrides": [{"pattern": "(a*)*" * 200, "device": "gpu"}]}}}),
            '"vllm_cpp.placement.overrides[0].device" is "gpu", which is not a device',
        ),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_a_document_made_to_hurt(document, says):
    text = refused(document)
    assert says in text
    assert len(text) < 400


def test_a_dict_made_to_hurt():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"vllm_cpp": deep}
    assert 'unknown key "vllm_cpp.vllm_cpp"' in refused(deep)
    endless: list = []
    endless.append(endless)
    assert '"vllm_cpp.placement.overrides[0]" must be an object' in refused({"vllm_cpp": {"placement": {"overrides": endless}}})
