"""The vocabulary all tiny models share: byte-level BPE, 256 bytes, some merges, fillers, five special tokens at the end.

Owns the token texts, kinds and merges, and the chat template. Small enough to read, rich enough to have merges of merges, a two-byte
character, and both kinds of special tokens.
"""

from __future__ import annotations

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

MERGES = [
    "Ġ t", "h e", "i n", "r e", "o n", "Ġt he", "e r", "Ġ a", "a t", "e n", "o u", "Ġ s", "i s", "Ġ o", "Ġ w", "a n", "in g", "e d",
    "o r", "Ġo f", "l l", "Ġ c", "Ġ b", "Ġ f", "i t", "a s", "a r", "e s", "Ġ p", "Ġa nd", "l o", "h a", "Ġt o", "ll o", "he llo", "w or",
    "l d", "wor ld", "Ġ in", "0 0", "1 2", "Ċ Ċ", "Ġ Ġ", "ĠĠ ĠĠ", "Ã ©", "e Ã©", ". .", ".. .", "! !",
]  # fmt: skip
SPECIAL = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED, "</think>": USER_DEFINED}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins by byte value: a printable byte is itself, the n-th other one is character 256 + n."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Token texts, token kinds, and the merges that fit into `size` tokens."""
    tokens, merges = byte_alphabet(), []
    for merge in MERGES:
        left, right = merge.split(" ")
        if left in tokens and right in tokens and len(tokens) + len(SPECIAL) < size:
            merges.append(merge)
            tokens.append(left + right)
    kinds = [NORMAL] * len(tokens)
    while len(tokens) + len(SPECIAL) < size:
        tokens.append(f"<|unused_{len(tokens)}|>")
        kinds.append(UNUSED)
    return tokens + list(SPECIAL), kinds + list(SPECIAL.values()), merges
