"""Random documents: each is accepted, or refused in a text that names the offending path or where the JSON breaks."""

from __future__ import annotations

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_cpp.config.offload import parse
from vllm_cpp.errors import InvalidArgumentError

KEYS = [
    *("offload_backend", "uva", "prefetch", "vllm_cpp", "cpu_offload_gb", "cpu_offload_params", "offload_group_size"),
    *("offload_num_in_group", "offload_prefetch_step", "offload_params", "mmap", "expert_stream", "device_fit", "placement"),
    *("enabled", "prefault", "slots", "slot_bytes", "weight_budget_bytes", "overrides", "cpu_moe", "n_cpu_moe", "fit", "pattern", "device"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(10**30), max_value=10**30),
    st.integers(min_value=-2, max_value=9),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["cpu", "cuda", "auto", "uva", "prefetch", "(", "a+", r"\.ffn_up_exps"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=4)), inner, max_size=4)
    ),
    max_leaves=12,
)


def groups(**fields: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(VALUES, st.fixed_dictionaries({}, optional=fields))


OVERRIDE = groups(pattern=st.one_of(SCALARS, st.just("a")), device=st.one_of(SCALARS, st.just("cpu")))
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "offload_backend": SCALARS,
        "uva": groups(cpu_offload_gb=SCALARS, cpu_offload_params=st.lists(SCALARS, max_size=2)),
        "prefetch": groups(offload_group_size=SCALARS, offload_num_in_group=SCALARS, offload_prefetch_step=SCALARS),
        "vllm_cpp": groups(
            mmap=groups(enabled=SCALARS, prefault=SCALARS),
            expert_stream=groups(enabled=SCALARS, slots=SCALARS, slot_bytes=SCALARS),
            device_fit=groups(weight_budget_bytes=SCALARS),
            placement=groups(overrides=st.lists(OVERRIDE, max_size=2), cpu_moe=SCALARS, n_cpu_moe=SCALARS, fit=SCALARS),
        ),
        "other": SCALARS,
    },
)
PATH = re.compile(r'"[^"]|offload_backend|cpu_offload_gb \(|offload_\w+ \(')


def outcome(document) -> str:
    """The refusal, or what the document says."""
    try:
        return repr(parse(document))
    except InvalidArgumentError as error:
        text = str(error)
        assert text.startswith(("offload config: ", "cpu_offload_gb (", "offload_"))
        assert PATH.search(text) or "malformed JSON" in text or "must be a JSON object" in text
        assert len(text) < 1000
        text.encode()
        return text


@settings(max_examples=600, deadline=None)
@given(DOCUMENTS)
def test_a_dict_is_accepted_or_refused_by_its_path(document):
    said = outcome(document)
    assert outcome(document) == said


@settings(max_examples=400, deadline=None)
@given(DOCUMENTS.filter(lambda document: "nan" not in repr(document) and "inf" not in repr(document)))
def test_text_and_dict_have_one_outcome(document):
    text = json.dumps(document)
    assert outcome(text) == outcome(json.loads(text))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.binary(), VALUES.map(lambda value: json.dumps(value, ensure_ascii=False))))
def test_any_text_is_accepted_or_refused(text):
    outcome(text)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.data())
def test_a_document_cut_or_bent_anywhere_is_refused_or_accepted(document, data):
    text = json.dumps(document)
    at = data.draw(st.integers(min_value=0, max_value=len(text)))
    outcome(text[:at])
    outcome(text[:at] + data.draw(st.sampled_from(['"', "{", "}", ",", "\\", "\x00", "9", "-", "null"])) + text[at:])
