"""Split sets: which files belong together, and whether they say so themselves.

Owns the naming rule `-NNNNN-of-MMMMM.gguf` and the agreement of the `split.*` keys. Must not know headers or tensors. The other shards'
paths are built from the given name alone: nothing in a file can point outside the set.
"""

from __future__ import annotations

import re

from vllm_cpp.errors import ModelLoadError
from vllm_cpp.gguf_file.values import KeyValues

NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.ASCII)


def shard_paths(path: str) -> list[str]:
    """The files of the set that `path` names, in order; the path alone when its name has no numbers."""
    match = NAME.fullmatch(path)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ModelLoadError(f"{path}: the name says shard {number} of {count}, expected 1 to {count}")
    return [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def check_shard(kv: KeyValues, index: int, count: int) -> None:
    """Does this file agree that it is number `index` (from 0) of `count`? A single file needs no split keys, and one that was merged
    from a set carries a count of 0."""
    said = kv.get_u32("split.count", 1)
    if said != count and (said, count) != (0, 1):
        if count > 1:
            raise kv.error("split.count", f"{'is' if 'split.count' in kv else 'is missing, which means'} {said}, but the name says {count}")
        raise kv.error(
            "split.count",
            f"is {said}: this is one shard of {said}, but its name does not say which; name the shards like model-00001-of-{said:05d}.gguf",
        )
    number = kv.get_u32("split.no", 0 if count == 1 else None)
    if number != index:
        raise kv.error("split.no", f"is {'missing' if number is None else number}, but the name says {index} (counted from 0)")


def check_total(kvs: list[KeyValues], found: int) -> None:
    """`split.tensors.count`, where it stands, is the number of tensors of the whole set."""
    for kv in kvs:
        said = kv.get_u32("split.tensors.count", found)
        if said != found:
            raise kv.error(
                "split.tensors.count", f"is {said}, but the {len(kvs)} shards hold {found} tensors; a shard may be from another set"
            )
