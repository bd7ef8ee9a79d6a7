"""The vocabulary of a file: texts, kinds and scores by token id, the ids with a job, and what the file asks for.

Owns the `tokenizer.*` keys: reading them, the checks they need, and the repairs llama.cpp makes where converters left a kind wrong. Must
not know how text becomes tokens. Which tokens end a generation is decided here, mostly by their text: files name one, models use several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from vllm_cpp import log
from vllm_cpp.errors import InvalidArgumentError
from vllm_cpp.gguf_file import GGUFModel
from vllm_cpp.gguf_file.vocabulary import check_vocabulary
from vllm_cpp.tokenizer.pre_tokenizers import PRE_TOKENIZERS

# As `tokenizer.ggml.model` names them.
BYTE_PAIR, CHARACTER_PAIR, SENTENCE_PIECE, WORD_PIECE, UNIGRAM = "gpt2", "gemma4", "llama", "bert", "t5"
_KINDS_OF_VOCABULARY = {
    BYTE_PAIR: "byte-level BPE", CHARACTER_PAIR: "BPE over characters", SENTENCE_PIECE: "SentencePiece", WORD_PIECE: "WordPiece",
    UNIGRAM: "Unigram",
}  # fmt: skip
# Ids of begin, end and unknown tokens that a file means which names none.
_USUAL_IDS: dict[str, tuple[int | None, int | None, int | None]] = {
    BYTE_PAIR: (11, 11, None), CHARACTER_PAIR: (None, None, None), SENTENCE_PIECE: (1, 2, 0), WORD_PIECE: (101, 102, 100),
    UNIGRAM: (None, 1, 2),
}  # fmt: skip
# WordPiece vocabularies name their begin and end tokens after their use in BERT.
_WORD_PIECE_ROLES = {"bos": ("bos", "cls"), "eos": ("seperator",)}  # the key is spelled so

# A token's kind, as flags: a repair can make a user-defined token a control token as well.
UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 2, 4, 8, 16, 32
HIDDEN = UNKNOWN | CONTROL  # not part of the text that decode() gives
_KIND_OF_TYPE = np.array([0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE], np.uint8)  # index: tokenizer.ggml.token_type

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")

# Texts that end a generation wherever they are tokens. A file that calls one of them an ordinary token is wrong.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
# Tokens of fill-in-the-middle, by the part of the key that names them. The first text found stands in for a missing key.
_FILL_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")  # a model that starts another file has finished this one
_OLD_FILL_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
# gpt-oss marks its channels with these; whoever reads the answer needs to see them.
_VISIBLE_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(slots=True)
class Vocabulary:
    """Everything a file says about its tokens. `kinds` holds flags; `ids` maps a text to the last token that has it."""

    source: str
    model: str
    pre: str
    tokens: list[str]
    ids: dict[str, int]
    kinds: np.ndarray  # u8[n]
    scores: np.ndarray  # f32[n], zeros if the file has none
    merges: list[str]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strip_after: frozenset[int] = frozenset()  # special tokens that swallow the white space after them
    eos_ids: frozenset[int] = frozenset()  # every token that ends a generation
    special_texts: dict[str, str] = field(default_factory=dict)  # "bos_token" -> its text, for chat templates
    lowercase: bool = True  # WordPiece: what is done to a text before it is cut
    strip_accents: bool = True
    merge_spaces: bool = False  # Unigram: likewise
    charsmap: bytes = b""

    def __len__(self) -> int:
        return len(self.tokens)

    def having(self, flags: int) -> list[int]:
        """The ids of all tokens that have any of these flags, in order."""
        return np.flatnonzero(self.kinds & flags).tolist()

    def rename_special(self, role: str, text: str, said_by: str) -> None:
        """Give the job of `role` ("bos" or "eos") to the token with this text."""
        token_id = self.ids.get(text)
        if token_id is None:
            raise InvalidArgumentError(f"{said_by}: {role}_token is {text!r}, which is no token of {self.source}")
        if role == "bos":
            self.bos_id = token_id
        else:
            self.eos_id = token_id
            self.eos_ids |= {token_id}
        self.kinds[token_id] |= CONTROL
        self.special_texts[f"{role}_token"] = text


def read_vocabulary(model: GGUFModel) -> Vocabulary:
    """Read and check the vocabulary. Raises ModelLoadError naming the key."""
    kv = model.kv
    name = kv.get_str("tokenizer.ggml.model")
    if name not in _KINDS_OF_VOCABULARY:
        known = ", ".join(f"'{model}' ({kind})" for model, kind in _KINDS_OF_VOCABULARY.items())
        raise kv.error("tokenizer.ggml.model", f"is '{name}'; supported are {known}")
    count = check_vocabulary(model)
    tokens = model.token_strings()
    ids = dict(zip(tokens, range(count), strict=True))
    ids.pop("", None)  # an empty text would be found everywhere
    byte_pair, merges = name == BYTE_PAIR, name in (BYTE_PAIR, CHARACTER_PAIR)
    pre = _pre_tokenizer(model) if byte_pair else "default"
    vocabulary = Vocabulary(
        source=model.path,
        model=name,
        pre=pre,
        tokens=tokens,
        ids=ids,
        kinds=_kinds(model, count),
        scores=_scores(model, count),
        merges=kv.get_array("tokenizer.ggml.merges", "str") if merges else [],
        bos_id=None,
        eos_id=None,
        unk_id=None,
        add_bos=PRE_TOKENIZERS[pre].add_bos if byte_pair else name != UNIGRAM,
        add_eos=name in (WORD_PIECE, UNIGRAM),
        add_space_prefix=not merges and kv.get_bool("tokenizer.ggml.add_space_prefix", name == SENTENCE_PIECE),
    )
    if name == WORD_PIECE:
        vocabulary.lowercase = kv.get_bool("tokenizer.ggml.normalizer.lowercase", True)
        vocabulary.strip_accents = kv.get_bool("tokenizer.ggml.normalizer.strip_accents", vocabulary.lowercase)
    elif name == UNIGRAM:
        vocabulary.merge_spaces = kv.get_bool("tokenizer.ggml.remove_extra_whitespaces", False)
        charsmap = kv.get_array("tokenizer.ggml.precompiled_charsmap", "int", None)
        vocabulary.charsmap = b"" if charsmap is None else charsmap.astype(np.uint8).tobytes()
    _check_byte_tokens(model, vocabulary)
    _read_special_ids(model, vocabulary)
    vocabulary.eos_ids = frozenset(_end_ids(model, vocabulary))
    vocabulary.strip_after = frozenset(_strip_after(model, vocabulary))
    return vocabulary


def _pre_tokenizer(model: GGUFModel) -> str:
    key = "tokenizer.ggml.pre"
    pre = model.kv.get_str(key, "")
    if not pre:
        log.once(
            f"{key} {model.path}",
            f"vllm: warning: {model.path} does not say how it cuts words ({key}); taking 'default', which may cost quality",
        )
        return "default"
    if pre not in PRE_TOKENIZERS:
        raise model.kv.error(key, f"is '{pre}', which is not among the supported: {', '.join(sorted(PRE_TOKENIZERS))}")
    return pre


def _kinds(model: GGUFModel, count: int) -> np.ndarray:
    types = model.kv.get_array("tokenizer.ggml.token_type", "int", None)
    if types is None:
        return np.full(count, NORMAL, np.uint8)
    known = (types >= 0) & (types < len(_KIND_OF_TYPE))
    return np.where(known, _KIND_OF_TYPE[np.where(known, types, 0)], 0).astype(np.uint8)


def _scores(model: GGUFModel, count: int) -> np.ndarray:
    key = "tokenizer.ggml.scores"
    scores = model.kv.get_array(key, "f32", None)
    if scores is None:
        return np.zeros(count, np.float32)
    odd = np.flatnonzero(np.isnan(scores))
    if odd.size:
        raise model.kv.error(key, f"of token {odd[0]} is not a number")
    return scores


def _check_byte_tokens(model: GGUFModel, vocabulary: Vocabulary) -> None:
    for token_id in vocabulary.having(BYTE):
        text = vocabulary.tokens[token_id]
        if not _BYTE_TOKEN.fullmatch(text):
            raise model.kv.error(
                "tokenizer.ggml.tokens", f"token {token_id} is of the byte kind but reads {text!r}, expected <0x00> to <0xFF>"
            )


def _read_special_ids(model: GGUFModel, vocabulary: Vocabulary) -> None:
    kv, count = model.kv, len(vocabulary)

    def key_id(role: str) -> int | None:
        token_id = kv.get_u32(f"tokenizer.ggml.{role}_token_id", None)
        return token_id if token_id is not None and token_id < count else None  # bos and eos were checked; others may point nowhere

    def usual_id(token_id: int) -> int | None:
        # What a file that names none means, but only where that token looks the part: 11 is <|endoftext|> in Falcon and a comma in Qwen.
        return token_id if token_id < count and vocabulary.kinds[token_id] & HIDDEN else None

    bos, eos, unk = _USUAL_IDS[vocabulary.model]
    word_piece = vocabulary.model == WORD_PIECE
    for role, usual in (("bos", bos), ("eos", eos), ("unknown", unk), ("padding", None)):
        named = (key_id(name) for name in (_WORD_PIECE_ROLES.get(role, (role,)) if word_piece else (role,)))
        token_id = next((i for i in named if i is not None), None)
        if token_id is None and usual is not None:
            token_id = usual_id(usual)
        if role in ("bos", "eos", "unknown"):
            setattr(vocabulary, "unk_id" if role == "unknown" else f"{role}_id", token_id)
        name = {"unknown": "unk_token", "padding": "pad_token"}.get(role, f"{role}_token")
        if token_id is not None:
            vocabulary.special_texts[name] = vocabulary.tokens[token_id]
    for name, role, token_id in (("add_bos", "bos", vocabulary.bos_id), ("add_eos", "eos", vocabulary.eos_id)):
        key = f"tokenizer.ggml.{name}_token"
        # Gemma 4's files say that it wants no begin token, which is not so.
        always = word_piece or (vocabulary.model == CHARACTER_PAIR and role == "bos")
        wanted = always or kv.get_bool(key, getattr(vocabulary, name))
        if wanted and token_id is None and key in kv:
            raise kv.error(key, f"is true, but the file names no {role} token (tokenizer.ggml.{role}_token_id)")
        setattr(vocabulary, name, wanted and token_id is not None)
    if word_piece:
        for role, token_id in (("cls", vocabulary.bos_id), ("seperator", vocabulary.eos_id), ("unknown", vocabulary.unk_id)):
            if token_id is None:
                raise kv.error(f"tokenizer.ggml.{role}_token_id", "missing; a WordPiece vocabulary cannot do without it")


def _end_ids(model: GGUFModel, vocabulary: Vocabulary) -> Iterable[int]:
    """All ids that end a generation; marks as control tokens those that have a known job and another kind."""
    kv, ids, kinds = model.kv, vocabulary.ids, vocabulary.kinds
    ends: set[int] = set()
    for part, texts in _FILL_TEXTS.items():
        keys = [f"tokenizer.ggml.{word}_token_id" for word in (part, _OLD_FILL_KEYS.get(part)) if word]
        named = next((i for i in (kv.get_u32(key, None) for key in keys) if i is not None and i < len(vocabulary)), None)
        if named is None:
            named = next((ids[text] for text in texts if text in ids), None)
            if named is not None:
                kinds[named] |= CONTROL
        if named is not None and part in _FILL_ENDS:
            ends.add(named)
    for text in _END_TEXTS:
        if text in ids:
            ends.add(ids[text])
            kinds[ids[text]] |= CONTROL
    for text in _VISIBLE_MARKS:
        if text in ids:
            kinds[ids[text]] = USER_DEFINED
    named_ends = [vocabulary.eos_id, *(kv.get_u32(f"tokenizer.ggml.{role}_token_id", None) for role in ("eot", "eom"))]
    ends.update(i for i in named_ends if i is not None)

    texts = {vocabulary.tokens[i] for i in ends}
    if "<|end|>" in texts and (
        {"<|return|>", "<|call|>"} <= texts or {"<|flush|>", "<|calls|>"} <= texts or {"<|flush|>", "<|call|>"} <= texts
    ):
        ends.discard(ids["<|end|>"])  # gpt-oss and Solar end a message with it, and a turn with the others
        kinds[ids["<|end|>"]] = USER_DEFINED
    if "</s>" in texts and "<|tool_response>" in texts:
        ends.discard(ids["</s>"])  # Gemma 4: an HTML tag
        kinds[ids["</s>"]] = NORMAL
    return ends


def _strip_after(model: GGUFModel, vocabulary: Vocabulary) -> Iterable[int]:
    """Phi-3's special tokens swallow the white space after them, all but three; no key says so."""
    name = model.kv.get_str("general.name", "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return ()
    special = {*vocabulary.having(HIDDEN | USER_DEFINED), *(i for i in (vocabulary.ids.get("</s>"),) if i is not None)}
    return special - {vocabulary.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
