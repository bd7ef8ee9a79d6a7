"""Writes the generated parts of these pages: what stands between `<!-- NAME: generated -->` and `<!-- end -->`.

    python docs/generate.py        (make docs)

Owns: the tables, made from the rows that the code itself uses, and the refusals, made by refusing. The prose around them is written by
hand. A test compares, so a page cannot fall behind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
PAGES: Final = ("environment.md", "weight-offload.md")
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


_PARTS: Final[dict[str, Callable[[], str]]] = {part.__name__: part for part in (variables, kinds, keys, shorthands, families, refusals)}


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
    sys.path[:0] = [str(ROOT / "engine")]
    sys.exit(main(sys.argv[1:]))
