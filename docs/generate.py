"""Writes the generated parts of these pages: what stands between `<!-- NAME: generated -->` and `<!-- end -->`.

    python docs/generate.py        (make docs)

Owns: the tables, made from the rows that the code itself uses, and the refusals, made by refusing. The prose around them is written by
hand. A test compares, so a page cannot fall behind.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
PAGES: Final = ("environment.md", "models.md", "weight-offload.md")
_PART: Final = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", re.DOTALL)
_REFUSED: Final = (
    '{"vllm-cpp":{}}',
    '{"vllm_cpp":{"mmapp":{}}}',
    '{"uva":{"cpu_offload_GB":10}}',
    '{"vllm_cpp":{"expert_stream":{"slots":8000.0}}}',
    '{"vllm_cpp":{"expert_stream":{"slots":0}}}',
    '{"vllm_cpp":{"expert_stream":{"stats_every":1}}}',
    '{"vllm_cpp":{"device_fit":{"weight_budget_bytes":-1}}}',
    '{"vllm_cpp":{"placement":{"overrides":[{"pattern":"(","device":"cpu"}]}}}',
    '{"vllm_cpp":{"placement":{"overrides":[{"pattern":"exps","device":"cuda"}]}}}',
    '{"vllm_cpp":{"placement":{"fit":true,"cpu_moe":true}}}',
    '{"uva":{"cpu_offload_gb":-1}}',
    '{"prefetch":{"offload_group_size":4,"offload_num_in_group":5}}',
    '{"offload_backend":"disk"}',
    '{"uva":{"cpu_offload_gb":1},"uva":{}}',
)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    cells = [list(head), *(list(row) for row in rows)]
    cells.insert(1, ["---"] * len(cells[0]))
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in cells)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def variables() -> str:
    from vllm_cpp import env

    rows = ([_code(row.name), row.kind.name.lower(), row.default, row.doc] for row in env.ROWS.values())
    return table(["variable", "kind", "default", "what it decides"], rows)


def kinds() -> str:
    from vllm_cpp import env

    return "".join("- **{}**: {}.\n".format(*kind.value.split(": ", 1)) for kind in env.Kind)


def keys() -> str:
    from vllm_cpp.config.offload.document import VARIABLES
    from vllm_cpp.config.offload.keys import KEYS

    rows = ([_code(key.path), key.kind, key.default, key.rule, _code(VARIABLES.get(key.field, "")), key.doc, key.on_cpu] for key in KEYS)
    return table(["key", "type", "default", "range", "variable", "what it decides", "on the CPU, today"], rows)


def shorthands() -> str:
    from vllm_cpp.config.offload import SHORTHANDS

    rows = ([_code(f"{row.flag} {row.value}".strip()), _code(row.keyword), _code(row.path), row.doc] for row in SHORTHANDS.values())
    return table(["flag of vllm-cli", "keyword of load", "key", "what it does"], rows)


def families() -> str:
    from vllm_cpp.models import registry

    def can(flag: bool) -> str:
        return "yes" if flag else "no"

    found = [registry.find(name) for name in registry.supported()]
    rows = ([_code(one.architecture), can(one.places_experts), can(one.consults_weight_offloader)] for one in found)
    return table(["architecture", "honours a placement", "consults the weight offloader"], rows)


def architectures() -> str:
    """One line a family file, in the words it begins with; they name its architectures."""
    from vllm_cpp.models import registry

    about: dict[str, str] = {}
    for name in registry.supported():
        module = registry.find(name).describe.__module__
        words = about.get(module) or " ".join(str(sys.modules[module].__doc__).split("\n\n")[0].split())
        about[module], found = re.subn(rf"(?<![\w`-]){re.escape(name)}(?![\w`-])", _code(name), words, count=1)
        assert found, f"{module} does not say that it is {name}"
    return "".join(f"- {words}\n" for words in sorted(about.values()))


def abilities() -> str:
    from vllm_cpp.models import registry

    def can(flag: bool) -> str:
        return "yes" if flag else "no"

    kept = _kept()
    rows = []
    for name in registry.supported():
        one = registry.find(name)
        keys, state = kept.get(name, (False, False))
        states = "a state that max_model_len sizes" if one.state_grows else "a state"
        keeps = ", ".join(["keys", "values"] * keys + [states] * state) or "nothing"
        embeds = "always" if one.encodes else "where declared" if one.pools else "no"
        rows.append(
            [
                _code(name),
                keeps,
                can(keys and not state),
                can(one.streams_experts),
                can(one.places_experts),
                can(one.consults_weight_offloader),
                embeds,
            ]
        )
    return table(
        [
            "architecture",
            "keeps of a sequence",
            "prefix caching",
            "streams experts",
            "honours a placement",
            "consults the weight offloader",
            "embeds",
        ],
        rows,
    )


def _kept() -> dict[str, tuple[bool, bool]]:
    """Of each architecture that generates text: whether a tiny model of it, loaded, has keys and values, and whether it has a state."""
    import tiny_models
    from vllm_cpp import models
    from vllm_cpp.config import offload
    from vllm_cpp.config.engine import EngineParams
    from vllm_cpp.gguf_file import open_model
    from vllm_cpp.gguf_file.hparams import read_hyper_parameters
    from vllm_cpp.models import registry

    kept = {}
    with tempfile.TemporaryDirectory() as folder:
        for family, (architecture, _) in tiny_models.FAMILIES.items():
            if architecture in kept:
                continue
            path = tiny_models.build(family).write(Path(folder) / "tiny.gguf")
            with open_model(path) as model:
                loaded = models.load(
                    model, EngineParams(model_path=str(path), threads=1, max_num_seqs=1, max_model_len=64), offload.Residency()
                )
                shapes = registry.find(architecture).kv_shapes(model, read_hyper_parameters(model))
                kept[architecture] = any(shapes), loaded.has_state
                loaded.close()
    return kept


def recordings() -> str:
    import tiny_models
    from tiny_models import embedding_families
    from vllm_cpp.models import registry

    vectors = ROOT / "tests" / "vectors"
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for case in json.loads((vectors / "logits" / "cases.json").read_text(encoding="utf-8")):
        found.setdefault(tiny_models.FAMILIES[case["family"]][0], []).append(("logits", case))
    for case in json.loads((vectors / "embeddings" / "cases.json").read_text(encoding="utf-8"))["cases"]:
        found.setdefault(embedding_families.EMBEDDERS[case["family"]][0], []).append(("embeddings", case))
    rows = []
    for name in registry.supported():
        cases = found.get(name, [])
        variants = sorted({case["family"] for _, case in cases} - {name})
        counts = [len([1 for kind, case in cases if kind == wanted]) for wanted in ("logits", "embeddings")]
        plain = len([1 for _, case in cases if case["dtype"] == "F32"])
        encodings = {encoding for _, case in cases for encoding in case.get("encodings", ())}
        rows.append([_code(name), ", ".join(map(_code, variants)), *(str(n or "") for n in (*counts, plain)), str(len(encodings) or "")])
    return table(["architecture", "variants", "recorded logits", "recorded embeddings", "of them in F32", "encodings"], rows)


def refusals() -> str:
    from vllm_cpp.config.offload import parse
    from vllm_cpp.errors import InvalidArgumentError

    def text(document: str) -> str:
        try:
            parse(document)
        except InvalidArgumentError as error:
            return str(error)
        raise AssertionError(f"{document} is no mistake any more")

    return table(["document", "what is said"], ([_code(document), text(document)] for document in _REFUSED))


_PARTS: Final[dict[str, Callable[[], str]]] = {
    part.__name__: part for part in (variables, kinds, keys, shorthands, families, architectures, abilities, recordings, refusals)
}


def generated(page: str) -> str:
    """The text of a page with its generated parts made anew."""

    def part(found: re.Match[str]) -> str:
        return f"{found[1]}{_PARTS[found[2]]()}{found[3]}"

    return _PART.sub(part, (ROOT / "docs" / page).read_text(encoding="utf-8"))


def main(arguments: list[str]) -> Any:
    if arguments:
        return f"{Path(__file__).name} takes no arguments"
    for page in PAGES:
        (ROOT / "docs" / page).write_text(generated(page), encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "engine"), str(ROOT / "tests")]
    sys.exit(main(sys.argv[1:]))
