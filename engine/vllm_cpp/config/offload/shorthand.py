"""Shorthands for the offload document: flags of vllm-cli and keywords of `load`.

Owns: which shorthand stands for which keys, and laying them over a document. Must not know what a key means: what comes out is a document,
read and refused like any other. A shorthand and a document that disagree are refused, because neither is the obvious winner.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .parse import parse
from .reader import load, printable, refusal


@dataclass(frozen=True)
class Shorthand:
    """One of them: its name as a keyword and as a flag, the flag's value, and the key it writes."""

    keyword: str
    flag: str
    value: str
    path: str
    doc: str


_ROWS: Final = (
    Shorthand("cpu_moe", "--cpu-moe", "", "vllm_cpp.placement.cpu_moe", "compute every routed expert on the CPU"),
    Shorthand("n_cpu_moe", "--n-cpu-moe", "N", "vllm_cpp.placement.n_cpu_moe", "the same for the first N layers only"),
    Shorthand(
        "override_tensor",
        "--override-tensor",
        "PATTERN=DEVICE",
        "vllm_cpp.placement.overrides",
        "where tensors whose name has PATTERN are computed; repeatable, the first that matches wins",
    ),
    Shorthand("fit", "--fit", "", "vllm_cpp.placement.fit", "compute as many layers' experts on the CPU as the device cannot hold"),
    Shorthand("mmap", "--no-mmap", "", "vllm_cpp.mmap.enabled", "copy the weights into memory instead of using the file's mapping"),
    Shorthand("expert_stream", "--expert-stream", "[SLOTS]", "vllm_cpp.expert_stream", "page routed experts into an arena of SLOTS slots"),
)
SHORTHANDS: Final[dict[str, Shorthand]] = {row.keyword: row for row in _ROWS}
"""By keyword."""

FLAGS: Final[dict[str, str]] = {row.keyword: row.flag for row in _ROWS}


def desugar(
    document: str | bytes | dict[str, Any] | None, given: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> str | bytes | dict[str, Any] | None:
    """The document with the given shorthands (by keyword) written into it; the document itself where none is given.

    `names` is how the caller spells them, for refusals: the keywords where it is left out.
    """
    if not given:
        return document
    parse(document)  # what is wrong in it is said first, and below its objects are objects
    tree = copy.deepcopy(load(document))
    for keyword, value in given.items():
        name = (names or {}).get(keyword, keyword)
        for path, written in _keys(SHORTHANDS[keyword], value, name).items():
            _write(tree, path, written, name)
    return tree


def _keys(shorthand: Shorthand, value: Any, name: str) -> dict[str, Any]:
    if shorthand.keyword == "override_tensor":
        return {shorthand.path: _overrides(value, name)}
    if shorthand.keyword != "expert_stream":
        return {shorthand.path: value}
    if isinstance(value, bool):
        return {f"{shorthand.path}.enabled": value}
    return {f"{shorthand.path}.enabled": True, f"{shorthand.path}.slots": value}


def _overrides(value: Any, name: str) -> list[dict[str, str]]:
    """From "PATTERN=DEVICE", a list of such texts, or a mapping from patterns to devices. Devices may be in capitals: many write so."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and "=" in text for text in texts):
            raise refusal(f"{name} takes PATTERN=DEVICE, not {printable(repr(value))}")
        pairs = [(pattern, device) for pattern, _, device in (text.partition("=") for text in texts)]
    return [{"pattern": pattern, "device": device.lower() if isinstance(device, str) else device} for pattern, device in pairs]


def _write(tree: dict[str, Any], path: str, value: Any, name: str) -> None:
    *groups, key = path.split(".")
    for group in groups:
        if tree.get(group) is None:
            tree[group] = {}
        tree = tree[group]
    if tree.get(key) is None:
        tree[key] = value
    elif _comparable(tree[key]) != value:
        raise refusal(f'"{path}" is {_shown(tree[key])} in the document and {_shown(value)} by {name}: say it in one of them')


def _comparable(value: Any) -> Any:
    return [dict(item) for item in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    return printable(json.dumps(value, default=repr)).replace('\\"', '"')
