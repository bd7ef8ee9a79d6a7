"""How each family cuts text into words before byte pairs are merged.

Owns the patterns by the name a file gives in `tokenizer.ggml.pre`, and what else that name implies. Must not know how words become tokens.
The names, and which of them share a family, are llama.cpp's. So are the patterns of the families whose vocabularies it ships with recorded
ids, where the two must agree to the letter. Where llama.cpp only approximates a model's own pattern because its regular expressions lack
the classes (gpt-4o and tekken: upper and lower case, combining marks), the model's own stands here: that is what it was trained with.

Patterns are Oniguruma's. A family is a sequence: each pattern cuts the pieces that the one before it left, and what no pattern matches
stays whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns in order; `ignore_merges`: a word that is a token is taken as it is; `add_bos`: unless the file says otherwise."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s+(?!\S)|\s+"
_LINES_AND_SPACES = r"\s*[\r\n]+|" + _SPACES

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES


def _llama3(
    digits: str,
    *,
    contraction: str = rf"(?:{_CONTRACTION})|",
    words: str = r"\p{L}+",
    signs: str = r"[^\s\p{L}\p{N}]+[\r\n]*",
    lines: str = r"\s*[\r\n]+",
    spaces: str = _SPACES,
) -> str:
    """The shape that cl100k started: contractions, words with one leading sign, digit groups, runs of signs, lines, spaces."""
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?{words}|{digits}| ?{signs}|{lines}|{spaces}"


def _cased(contraction: str, digits: str, without: str = "", tail: str = r"[\r\n/]*") -> str:
    """The shape that o200k started: a word ends where lower case turns to upper."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{tail}|" + _LINES_AND_SPACES


_OPTIONAL_CONTRACTION = rf"(?:{_CONTRACTION})?"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SIGN_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""


def _deepseek3(tail: str) -> str:
    return rf"{_ASCII_SIGN_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+{tail}"


_DEEPSEEK3 = _deepseek3(r"[\r\n]*|" + _LINES_AND_SPACES)
_SPACED_WORDS = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
# Digits in threes counted from the right end of their run.
_THREES_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"

# DeepSeek LLM spells its cased letters out, as of an old Unicode.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    "\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d"
    "\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
# White space is taken out of DeepSeek's own classes (they hold U+3000 and a few more), as in the recorded ids.
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&[^\\s]]+"

_ASIAN_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _CJK
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HALVING_SPACES = "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}"

_LLAMA3 = PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_PLAIN_LLAMA3 = PreTokenizer((_llama3(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_llama3(r"\p{N}"),))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_GPT4O = PreTokenizer((_cased(_OPTIONAL_CONTRACTION, r"\p{N}{1,3}"),))

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3),
    ("dbrx smaug-bpe chatglm-bpe", _PLAIN_LLAMA3),
    ("glm4 glm5", PreTokenizer(_LLAMA3.patterns, ignore_merges=True)),
    ("jais-2", PreTokenizer((_llama3(r"\p{N}{1,3}", spaces=_HALVING_SPACES),))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _llama3(r"\p{N}+")), ignore_merges=True)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2", _QWEN2),
    ("qwen35", PreTokenizer((_llama3(r"\p{N}", words=r"[\p{L}\p{M}]+", signs=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),))),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _llama3(r"\p{N}")))),
    ("ufakzeka", PreTokenizer((_llama3(r"\p{N}", contraction=""),))),
    ("seed-coder", PreTokenizer((_llama3(r"\p{N}", signs=r"[^\s\p{L}\p{N}\r\n]+"),))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_llama3(r"\p{N}", lines=r"\s*[\r\n]"),))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK_V3),
    ("spark2_5", PreTokenizer((r"\p{N}{1,3}", _CJK, _deepseek3(r"|[\r\n]|" + _SPACES), r"\p{N}"))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                "[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
                r"\s+\z",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS_GPT2),
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion granite-docling", _PLAIN_GPT2),
    ("exaone-moe", PreTokenizer((_llama3(r"\p{N}", words=_SPACED_WORDS, signs=r"[^\s\p{L}\p{N}]+[\r\n/]?", lines=r"\s*[\r\n]"),))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    ("tekken", PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True)),
    ("youtu", PreTokenizer((_YOUTU_SCRIPTS, _cased(_OPTIONAL_CONTRACTION, r"\p{N}")), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns))),
    ("kimi-k2", PreTokenizer((r"\p{Han}+|" + _cased(_OPTIONAL_CONTRACTION, r"\p{N}{1,3}", r"&&[^\p{Han}]", r"[\r\n]*"),))),
    ("afmoe", PreTokenizer((_THREES_FROM_RIGHT, _ASIAN_SCRIPTS, _DEEPSEEK3))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: family for names, family in _FAMILIES for name in names.split()}
