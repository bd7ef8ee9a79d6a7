"""An opened model: values by type, tensors by shape, the life of the mapping, and agreement with the gguf package's reader."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from tiny_models import build
from tiny_models.container import Stored, file_bytes, value
from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file import GGUFModel, open_model
from vllm_cpp.quants import ENCODINGS

TinyModels = Callable[[str], Path]


@pytest.fixture
def model_of(tmp_path: Path):
    """Opens a file of the given keys and no tensors."""
    models: list[GGUFModel] = []

    def make(**kvs: bytes) -> GGUFModel:
        path = tmp_path / "m.gguf"
        path.write_bytes(file_bytes({key.replace("__", "."): v for key, v in kvs.items()}, {}))
        models.append(open_model(path))
        return models[-1]

    yield make
    for model in models:
        model.close()


# -- against the gguf package
@pytest.mark.parametrize("name", ["qwen3moe-s1-z0-mix", "llama-s1-z1-mix", "llama_rope_freqs-s1-z0-F32", "qwen3moe-s86-z1-NVFP4"])
def test_same_tensors_and_values_as_the_gguf_package(tiny_model: TinyModels, name: str) -> None:
    reader = gguf.GGUFReader(tiny_model(name))
    with open_model(tiny_model(name)) as model:
        theirs = {key: f.contents() for key, f in reader.fields.items() if not key.startswith("GGUF.")}
        assert {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in model.kv.items()} == theirs
        assert list(model.tensors) == [t.name for t in reader.tensors]
        for t in reader.tensors:
            info = model.tensors[t.name]
            assert info.shape == tuple(reversed(t.shape.tolist()))
            assert (info.encoding.name, info.n_bytes, info.file_offset) == (t.tensor_type.name, t.n_bytes, t.data_offset)
            assert model.bytes_of(t.name).tobytes() == t.data.tobytes()


def test_address_is_that_of_the_bytes(tiny_model: TinyModels) -> None:
    with open_model(tiny_model("qwen3moe-s1-z0-mix")) as model:
        for name, info in model.tensors.items():
            assert ctypes.string_at(info.address, info.n_bytes) == model.bytes_of(name).tobytes()


def test_tokens_in_order(tiny_model: TinyModels) -> None:
    with open_model(tiny_model("qwen3moe-s1-z0-F32")) as model:
        tokens = model.token_strings()
        assert len(tokens) == model.num_tokens == 320
        assert tokens[ord("A")] == "A"
        assert tokens[-1] == "</think>"


# -- typed getters
def test_getters_return_the_value_or_the_default(model_of) -> None:
    model = model_of(u=value(7), f=value(0.5), b=value(True), s=value("x"), a=value([1, 2], "u32"), t=value(["p", "q"]))
    assert (model.get_u32("u"), model.get_f32("f"), model.get_bool("b"), model.get_str("s")) == (7, 0.5, True, "x")
    assert model.get_array("a", "u32").tolist() == [1, 2]
    assert model.get_array("a", "int").tolist() == [1, 2]
    assert model.get_array("t", "str") == ["p", "q"]
    for get in (model.get_u32, model.get_f32, model.get_bool, model.get_str):
        assert get("absent", None) is None
        with pytest.raises(ModelLoadError, match=r"key 'absent': missing; this model needs it"):
            get("absent")
    assert model.get_array("absent", "str", ()) == ()


@pytest.mark.parametrize(
    ("getter", "v", "text"),
    [
        ("get_u32", value("7"), r"key 'k' at byte \d+: is str, expected an unsigned 32-bit integer"),
        ("get_u32", value(7.0), r"is f32, expected"),
        ("get_u32", value(True), r"is bool, expected"),
        ("get_u32", value([7]), r"is array of i32, expected"),
        ("get_u32", value(-1, "i32"), r"is -1, expected 0 to 4294967295"),
        ("get_u32", value(1 << 32, "u64"), r"is 4294967296, expected 0 to"),
        ("get_f32", value(1), r"is u32, expected a 32-bit float"),
        ("get_f32", value(float("nan")), r"is nan, expected a finite number"),
        ("get_f32", value(float("-inf")), r"is -inf, expected a finite number"),
        ("get_bool", value(1), r"is u32, expected a bool"),
        ("get_str", value(1), r"is u32, expected a string"),
        ("get_str", value(b"\xff"), r"key 'k' at byte \d+: not UTF-8"),
    ],
)
def test_getters_refuse_another_type(model_of, getter: str, v: bytes, text: str) -> None:
    with pytest.raises(ModelLoadError, match=text):
        getattr(model_of(k=v), getter)("k")


@pytest.mark.parametrize("width", ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"])
def test_a_count_may_have_any_integer_width(model_of, width: str) -> None:
    assert model_of(k=value(7, width)).get_u32("k") == 7


@pytest.mark.parametrize(
    ("kind", "v", "text"),
    [
        ("f32", value([1, 2]), r"is array of i32, expected an array of f32"),
        ("int", value([1.0]), r"is array of f32, expected an array of int"),
        ("str", value([1]), r"is array of i32, expected an array of str"),
        ("u32", value(1), r"is u32, expected an array of u32"),
        ("str", value(["fine", b"\xc3("]), r"element 1 at byte \d+ is not UTF-8"),
    ],
)
def test_arrays_refuse_another_element_type(model_of, kind: str, v: bytes, text: str) -> None:
    with pytest.raises(ModelLoadError, match=text):
        model_of(k=v).get_array("k", kind)


# -- tensors by shape
@pytest.fixture
def shaped(tmp_path: Path):
    f32, q8 = ENCODINGS["F32"].ggml_id, ENCODINGS["Q8_0"].ggml_id
    tensors = {"row": Stored((4, 1), f32, bytes(16)), "vec": Stored((4,), f32, bytes(16)), "mat": Stored((32, 2), q8, bytes(68))}
    path = tmp_path / "m.gguf"
    path.write_bytes(file_bytes({}, tensors))
    with open_model(path) as model:
        yield model


def test_need_and_maybe(shaped: GGUFModel) -> None:
    assert shaped.need("mat", (2, 32)) == shaped.tensors["mat"]
    assert shaped.need("mat", (2, 32), ("F32", "Q8_0")).encoding.name == "Q8_0"
    assert shaped.maybe("absent", (2, 32)) is None
    # A vector and a matrix of one row are the same in the file's terms; the answer has the shape asked for.
    assert shaped.need("row", (4,)).shape == (4,)
    assert shaped.need("vec", (1, 1, 4)).shape == (1, 1, 4)


def test_need_names_what_is_wrong(shaped: GGUFModel) -> None:
    with pytest.raises(ModelLoadError, match=r"tensor 'absent' is missing; this model needs it with shape \(2, 32\)"):
        shaped.need("absent", (2, 32))
    for ask in (shaped.need, shaped.maybe):
        with pytest.raises(ModelLoadError, match=r"tensor 'mat' at byte \d+ has shape \(2, 32\), expected \(32, 2\)"):
            ask("mat", (32, 2))
        with pytest.raises(ModelLoadError, match=r"tensor 'mat' at byte \d+ is Q8_0, expected F32 or F16"):
            ask("mat", (2, 32), ("F32", "F16"))
    with pytest.raises(ModelLoadError, match=r"has shape \(4\), expected \(1\)"):
        shaped.need("vec", (1,))


# -- opening and closing
@pytest.mark.parametrize(
    ("name", "text"),
    [("absent.gguf", "no such file"), ("folder", "not a regular file"), ("pipe", "not a regular file"), ("nul\0", "cannot be opened")],
)
def test_what_cannot_be_opened_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelLoadError, match=text) as caught:
        open_model(f"{tmp_path}/{name}")
    assert name in str(caught.value)


def test_bytes_and_path_objects_name_files_too(tiny_model: TinyModels) -> None:
    path = tiny_model("llama-s1-z0-F32")
    for form in (path, str(path), os.fsencode(path)):
        with open_model(form) as model:
            assert model.architecture == "llama"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_stays_open(tiny_model: TinyModels, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model("llama-s1-z0-F32").read_bytes()[:5000])
    before = descriptors()
    for _ in range(5):
        model = open_model(tiny_model("llama-s1-z0-F32"))
        model.close()
        model.close()
        with pytest.raises(ModelLoadError):
            open_model(broken)
    assert descriptors() == before
    mapped = Path("/proc/self/maps").read_text()
    assert "llama-s1-z0-F32.gguf" not in mapped
    assert "broken.gguf" not in mapped


def test_a_view_outlives_the_model(tiny_model: TinyModels) -> None:
    model = open_model(tiny_model("llama-s1-z0-F32"))
    view = model.bytes_of("output_norm.weight")
    want = view.tobytes()
    model.close()
    assert view.tobytes() == want
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_values_after_close_are_refused_or_already_there(tiny_model: TinyModels) -> None:
    model = open_model(tiny_model("llama-s1-z0-F32"))
    assert model.architecture == "llama"
    model.close()
    assert model.architecture == "llama"
    with pytest.raises(ModelLoadError, match="after the model was closed"):
        model.token_strings()


# -- split sets
@pytest.fixture
def split_set(tmp_path: Path) -> list[Path]:
    return build("qwen3moe", 1, 0, "mix").write_split(tmp_path / "set.gguf", 3)


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_any_shard_opens_the_set(split_set: list[Path], tiny_model: TinyModels, shard: int) -> None:
    with open_model(split_set[shard]) as model, open_model(tiny_model("qwen3moe-s1-z0-mix")) as whole:
        assert {t.shard for t in model.tensors.values()} == {0, 1, 2}
        assert list(model.tensors) == list(whole.tensors)
        for name, info in whole.tensors.items():
            assert model.tensors[name].shape == info.shape
            assert model.bytes_of(name).tobytes() == whole.bytes_of(name).tobytes()
            assert ctypes.string_at(model.tensors[name].address, info.n_bytes) == whole.bytes_of(name).tobytes()
        assert model.architecture == "qwen3moe"
        assert model.token_strings() == whole.token_strings()


def test_the_first_shard_may_hold_no_tensors(tmp_path: Path) -> None:
    tiny = build("llama", 1)
    split = {"split.count": value(2, "u16"), "split.tensors.count": value(len(tiny.tensors), "i32")}
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(file_bytes({**tiny.kvs, **split, "split.no": value(0, "u16")}, {}))
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(file_bytes({**split, "split.no": value(1, "u16")}, tiny.tensors))
    with open_model(tmp_path / "m-00002-of-00002.gguf") as model:
        assert len(model.tensors) == len(tiny.tensors)
        assert model.architecture == "llama"


def test_a_missing_shard_is_named(split_set: list[Path]) -> None:
    split_set[1].unlink()
    for path in (split_set[0], split_set[2]):
        with pytest.raises(ModelLoadError, match=r"set-00002-of-00003\.gguf: no such file; the name .* asks for 3 shards"):
            open_model(path)


def test_nothing_stays_open_of_a_broken_set(split_set: list[Path]) -> None:
    split_set[2].write_bytes(split_set[2].read_bytes()[:100])
    before = descriptors()
    with pytest.raises(ModelLoadError, match=r"set-00003-of-00003\.gguf"):
        open_model(split_set[0])
    assert descriptors() == before


def one_shard(kvs: dict[str, object], tensor: str = "a") -> bytes:
    values = {key: v if isinstance(v, bytes) else value(v, "u16") for key, v in kvs.items()}
    return file_bytes(values, {tensor: Stored((4,), ENCODINGS["F32"].ggml_id, bytes(16))})


TWO = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        pytest.param({TWO[0]: {}, TWO[1]: {}}, r"'split\.count': is missing, which means 1, but the name says 2", id="no keys"),
        pytest.param({TWO[0]: {"split.count": 3, "split.no": 0}}, r"'split\.count' at byte \d+: is 3, but the name says 2", id="count"),
        pytest.param({TWO[0]: {"split.count": value(2.0)}}, r"'split\.count' at byte \d+: is f32", id="count type"),
        pytest.param({TWO[0]: {"split.count": 2}}, r"'split\.no': is missing, but the name says 0", id="no number"),
        pytest.param({TWO[0]: {"split.count": 2, "split.no": 1}}, r"'split\.no' at byte \d+: is 1, but the name says 0", id="swapped"),
        pytest.param(
            {TWO[0]: {"split.count": 2, "split.no": 0}, TWO[1]: {"split.count": 4, "split.no": 1}},
            r"m-00002-of-00002\.gguf: key 'split\.count' at byte \d+: is 4, but the name says 2",
            id="second of another set",
        ),
        pytest.param(
            {TWO[0]: {"split.count": 2, "split.no": 0}, TWO[1]: {"split.count": 2, "split.no": 1}},
            r"m-00002-of-00002\.gguf: tensor 'a' \(byte \d+\) is already in .*m-00001-of-00002\.gguf",
            id="tensor twice",
        ),
        pytest.param({"m-00003-of-00002.gguf": {}}, r"the name says shard 3 of 2", id="number past the count"),
        pytest.param({"m-00000-of-00002.gguf": {}}, r"the name says shard 0 of 2", id="number zero"),
        pytest.param(
            {"m.gguf": {"split.count": 2, "split.no": 0}}, r"'split\.count' at byte \d+: is 2: this is one shard of 2", id="renamed"
        ),
        pytest.param({"m.gguf": {"split.tensors.count": value(9, "i32")}}, r"'split\.tensors\.count' at byte \d+: is 9, but", id="total"),
    ],
)
def test_split_refusals(tmp_path: Path, files: dict[str, dict[str, object]], text: str) -> None:
    for name, kvs in files.items():
        (tmp_path / name).write_bytes(one_shard(kvs))
    with pytest.raises(ModelLoadError, match=text):
        open_model(tmp_path / next(iter(files)))


def test_total_of_a_set_is_checked_in_every_shard(tmp_path: Path) -> None:
    common = {"split.count": 2, "split.tensors.count": value(2, "i32")}
    (tmp_path / TWO[0]).write_bytes(one_shard({**common, "split.no": 0}, "a"))
    (tmp_path / TWO[1]).write_bytes(one_shard({**common, "split.no": 1, "split.tensors.count": value(3, "i32")}, "b"))
    with pytest.raises(
        ModelLoadError, match=r"m-00002-of-00002\.gguf: key 'split\.tensors\.count' at byte \d+: is 3, but the 2 shards hold 2"
    ):
        open_model(tmp_path / TWO[0])


@pytest.mark.parametrize(
    ("name", "kvs"),
    [
        pytest.param("m.gguf", {"split.count": 0, "split.no": 0}, id="merged from a set"),
        pytest.param("m-00001-of-00001.gguf", {"split.count": 1, "split.no": 0}, id="a set of one"),
        pytest.param("m-00001-of-00001.gguf", {}, id="a set of one without keys"),
        pytest.param("m-0001-of-0002.gguf", {}, id="four digits are a name like any other"),
    ],
)
def test_single_files(tmp_path: Path, name: str, kvs: dict[str, object]) -> None:
    (tmp_path / name).write_bytes(one_shard(kvs))
    with open_model(tmp_path / name) as model:
        assert list(model.tensors) == ["a"]
