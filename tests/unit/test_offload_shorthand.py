"""Flags and keywords that stand for keys of the document: what they write, and that a document which says otherwise is refused."""

from __future__ import annotations

import json

import pytest

from vllm_cpp import api, env, log
from vllm_cpp.cli import arguments
from vllm_cpp.cli.arguments import UsageError
from vllm_cpp.config.offload import SHORTHANDS, desugar, parse
from vllm_cpp.config.offload.install import reset
from vllm_cpp.config.offload.shorthand import FLAGS
from vllm_cpp.errors import InvalidArgumentError, ModelLoadError, UnknownKeywordError

EXPS = [{"pattern": "exps", "device": "cpu"}]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in env.ROWS:
        monkeypatch.delenv(name, raising=False)
    reset()
    log.forget()
    yield
    reset()
    log.forget()


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"cpu_moe": True}, {"placement": {"cpu_moe": True}}),
        ({"n_cpu_moe": 3}, {"placement": {"n_cpu_moe": 3}}),
        ({"override_tensor": "exps=CPU"}, {"placement": {"overrides": EXPS}}),
        ({"override_tensor": ["exps=cpu", "a=b=cpu"]}, {"placement": {"overrides": [*EXPS, {"pattern": "a", "device": "b=cpu"}]}}),
        ({"override_tensor": {"exps": "cpu"}}, {"placement": {"overrides": EXPS}}),
        ({"fit": True}, {"placement": {"fit": True}}),
        ({"mmap": False}, {"mmap": {"enabled": False}}),
        ({"expert_stream": True}, {"expert_stream": {"enabled": True}}),
        ({"expert_stream": False}, {"expert_stream": {"enabled": False}}),
        ({"expert_stream": 64}, {"expert_stream": {"enabled": True, "slots": 64}}),
        ({"cpu_moe": True, "mmap": True}, {"placement": {"cpu_moe": True}, "mmap": {"enabled": True}}),
    ],
)
def test_what_a_shorthand_writes(given, written):
    assert desugar(None, given) == {"vllm_cpp": written}
    assert desugar('{"vllm_cpp":{"mmap":null}}', given)["vllm_cpp"].items() >= {k: v for k, v in written.items() if k != "mmap"}.items()


def test_nothing_given_is_the_document_itself():
    document = {"vllm_cpp": {}}
    assert desugar(document, {}) is document
    assert desugar(None, {}) is None


def test_a_document_is_completed_and_left_as_it_was():
    document = {"vllm_cpp": {"mmap": {"prefault": False}, "placement": {"n_cpu_moe": None}}}
    before = json.dumps(document)
    written = desugar(document, {"mmap": False, "n_cpu_moe": 2})
    assert written == {"vllm_cpp": {"mmap": {"prefault": False, "enabled": False}, "placement": {"n_cpu_moe": 2}}}
    assert json.dumps(document) == before


@pytest.mark.parametrize(
    ("document", "given", "text"),
    [
        ({"mmap": {"enabled": True}}, {"mmap": False}, '"vllm_cpp.mmap.enabled" is true in the document and false by {}'),
        ({"placement": {"cpu_moe": False}}, {"cpu_moe": True}, '"vllm_cpp.placement.cpu_moe" is false in the document and true by {}'),
        ({"placement": {"n_cpu_moe": 2}}, {"n_cpu_moe": 3}, '"vllm_cpp.placement.n_cpu_moe" is 2 in the document and 3 by {}'),
        ({"expert_stream": {"slots": 8}}, {"expert_stream": 9}, '"vllm_cpp.expert_stream.slots" is 8 in the document and 9 by {}'),
        (
            {"expert_stream": {"enabled": False}},
            {"expert_stream": 9},
            '"vllm_cpp.expert_stream.enabled" is false in the document and true by {}',
        ),
        ({"placement": {"fit": False}}, {"fit": True}, '"vllm_cpp.placement.fit" is false in the document and true by {}'),
        (
            {"placement": {"overrides": []}},
            {"override_tensor": "exps=cpu"},
            '"vllm_cpp.placement.overrides" is [] in the document and [{{"pattern": "exps", "device": "cpu"}}] by {}',
        ),
    ],
)
def test_a_document_that_says_otherwise_is_refused_and_one_that_agrees_is_not(document, given, text):
    [keyword] = given
    for names in (None, FLAGS):
        with pytest.raises(InvalidArgumentError) as caught:
            desugar({"vllm_cpp": document}, given, names)
        name = keyword if names is None else SHORTHANDS[keyword].flag
        assert str(caught.value) == f"offload config: {text.format(name)}: say it in one of them"
    agreed = desugar(None, given)
    assert desugar(agreed, given) == desugar(json.dumps(agreed), given) == agreed


def test_a_document_s_own_mistake_is_said_first_and_a_wrong_value_by_its_path():
    with pytest.raises(InvalidArgumentError, match='unknown key "vllm-cpp"'):
        desugar('{"vllm-cpp":{}}', {"cpu_moe": True})
    with pytest.raises(InvalidArgumentError, match="override_tensor takes PATTERN=DEVICE, not 3"):
        desugar(None, {"override_tensor": 3})
    with pytest.raises(InvalidArgumentError, match="override_tensor takes PATTERN=DEVICE"):
        desugar(None, {"override_tensor": ["exps"]})
    for given, says in [
        ({"cpu_moe": 1}, '"vllm_cpp.placement.cpu_moe" must be a boolean'),
        ({"n_cpu_moe": -1}, '"vllm_cpp.placement.n_cpu_moe" must not be negative (got -1)'),
        ({"expert_stream": 0}, '"vllm_cpp.expert_stream.slots" must be positive (got 0)'),
        ({"override_tensor": "(=cpu"}, '"vllm_cpp.placement.overrides[0].pattern" is not a valid regex'),
        ({"override_tensor": "exps=tpu"}, '"vllm_cpp.placement.overrides[0].device" is "tpu", which is not a device'),
        ({"override_tensor": {"exps": 3}}, '"vllm_cpp.placement.overrides[0].device" must be a non-empty string'),
        ({"fit": True, "cpu_moe": True}, '"vllm_cpp.placement.fit" cannot be combined with a manual placement'),
    ]:
        with pytest.raises(InvalidArgumentError) as caught:
            parse(desugar(None, given))
        assert str(caught.value).startswith(f"offload config: {says}")


class TestPython:
    MISSING = "/nonexistent/model.gguf"

    def test_keywords_stand_in_the_installed_line(self, capfd):
        with pytest.raises(ModelLoadError, match="no such file"):
            api.load(
                self.MISSING,
                mmap=False,
                n_cpu_moe=2,
                override_tensor="exps=cpu",
                offload_config={"vllm_cpp": {"mmap": {"prefault": False}}},
            )
        said = capfd.readouterr().err.splitlines()[0]
        assert said == "engine: weight residency (offload_config vllm_cpp): mmap=off prefault=off n_cpu_moe=2 placement_overrides=1"

    def test_they_are_refused_by_name(self):
        with pytest.raises(InvalidArgumentError, match=r'"vllm_cpp\.mmap\.enabled" is true in the document and false by mmap'):
            api.load(self.MISSING, mmap=False, offload_config='{"vllm_cpp":{"mmap":{"enabled":true}}}')
        with pytest.raises(UnknownKeywordError, match="load has no parameter 'n_cpu_mo'; did you mean 'n_cpu_moe'"):
            api.load(self.MISSING, n_cpu_mo=1)
        with pytest.raises(UnknownKeywordError, match="plan has no parameter 'progress'"):
            api.plan(self.MISSING, progress=print)


class TestFlags:
    def read(self, *flags):
        return arguments.parse(["--model", "m", *flags])

    def test_every_shorthand_has_its_flag(self):
        options = self.read(
            "--cpu-moe", "--n-cpu-moe", "3", "-ot", "a=cpu", "--override-tensor=b=c=cpu", "--fit", "--no-mmap", "--expert-stream"
        )
        assert {name: getattr(options, name) for name in SHORTHANDS} == {
            "cpu_moe": True,
            "n_cpu_moe": 3,
            "override_tensor": ["a=cpu", "b=c=cpu"],
            "fit": True,
            "mmap": False,
            "expert_stream": True,
        }
        assert all(getattr(self.read(), name) is None for name in SHORTHANDS)

    @pytest.mark.parametrize(
        ("flags", "slots"),
        [
            (["--expert-stream", "64"], 64),
            (["--expert-stream=64"], 64),
            (["--expert-stream", "--stream"], True),
            (["--expert-stream"], True),
        ],
    )
    def test_slots_may_be_left_out(self, flags, slots):
        options = self.read(*flags)
        assert options.expert_stream == slots
        assert options.stream is ("--stream" in flags)

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["-ot", "exps"], "'exps' is not PATTERN=DEVICE (-ot)"),
            (["--n-cpu-moe", "many"], "'many' is not an integer (--n-cpu-moe)"),
            (["--expert-stream=many"], "'many' is not an integer (--expert-stream)"),
            (["--expert-stream", "many"], "unknown argument 'many': behind --expert-stream stands a whole number, or nothing"),
            (["--cpu-moe=1"], "unknown argument '--cpu-moe=1'"),
            (["-ot"], "missing value for '-ot'"),
            (["--plan", "-p", "a"], "--plan loads nothing: leave --prompt and --stream out"),
        ],
    )
    def test_a_wrong_one_is_a_wrong_argument(self, flags, says):
        with pytest.raises(UsageError) as caught:
            self.read(*flags)
        assert str(caught.value) == says
