"""Patterns of overrides: they find what Python's own matcher finds, and no pattern can keep the search busy."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_cpp.config.offload import pattern
from vllm_cpp.config.offload.pattern import Allowance, OutOfSteps, Pattern, PatternError

NAMES = ["blk.0.ffn_up_exps.weight", "blk.12.ffn_down_exps.weight", "blk.1.ffn_gate_up_chexps.weight", "token_embd.weight", "a\n", "\n"]
# Short texts over few characters, so that patterns match now and then, and every construct meets every other.
ATOMS = st.one_of(
    st.sampled_from([*"ab.0_\n", ".", r"\.", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\b", r"\B", r"\A", r"\Z", "^", "$", r"\n", r"\_"]),
    st.sampled_from(["[ab]", "[^ab]", "[a-c.]", r"[\d_]", r"[^\w]", "[]a]", "[^]a]", r"[\b]", "[a-]", r"[\n-\.]", "{", "}", "a{", "{,"]),
)
REPEATS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{2,}", "{0}", "{1,2}?"])
OPENINGS = st.sampled_from(["(", "(?:", "(?=", "(?!", "(?P<n>"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map("|".join),
        st.tuples(OPENINGS, inner).map(lambda part: f"{part[0]}{part[1]})"),
        st.tuples(OPENINGS.filter(lambda text: text in ("(", "(?:")), inner, REPEATS).map(lambda part: f"{part[0]}{part[1]}){part[2]}"),
        st.tuples(ATOMS, REPEATS).map("".join),
    ),
    max_leaves=8,
)


@settings(max_examples=800, deadline=None)
@given(PATTERNS, st.one_of(st.sampled_from(NAMES), st.text("ab.0_\n", min_size=1, max_size=8)))
def test_it_finds_what_python_finds(text, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = bool(re.compile(text).search(name))
        except re.error:
            with pytest.raises(PatternError):
                Pattern(text)
            return
    assert Pattern(text).search(name, Allowance()) is expected


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (r"\.ffn_(up|down|gate|gate_up)_(ch|)exps", [0, 1, 2]),
        (r"blk\.0\..*ffn_.*_exps", [0]),
        (r"blk\.(?:[0-9])\.", [0, 2]),
        (r"blk\.(?!0\.).*exps\.weight$", [1, 2]),
        (r"^token_embd", [3]),
        (r"weight\Z", [0, 1, 2, 3]),
        ("", range(6)),
    ],
)
def test_patterns_as_people_write_them(text, names):
    assert [i for i, name in enumerate(NAMES) if Pattern(text).search(name, Allowance())] == list(names)


@pytest.mark.parametrize(
    "text",
    [
        *("(a*)*$b", "(a|a)*$b", "(.*)*x", "(.+)+x", r"(\w+\s?)*\.$x", "^(([a-z])+.)+[A-Z]([a-z])+$", "(x+x+)+y"),
        *(".*" * 40 + "z", "(?:a?){60}a{60}b"),
    ],
)
def test_what_would_backtrack_for_ever_is_answered(text):
    allowance = Allowance(300_000)
    assert not Pattern(text).search("a" * 63, allowance)


def test_an_allowance_is_shared_and_runs_out():
    allowance = Allowance(20)
    assert not Pattern("a").search("bbbb", allowance)
    with pytest.raises(OutOfSteps):
        Pattern("(a|b|.)*" * 9 + "zz").search("a" * 63, allowance)
    with pytest.raises(OutOfSteps):
        Pattern("a").search("b", allowance)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(", "missing ), unterminated subpattern at position 0"),
        ("[", "unterminated character set at position 0"),
        ("*a", "nothing to repeat at position 0"),
        (r"(a)\1", r"'\1' (position 3) cannot be searched in bounded time and is not supported"),
        ("(?<=a)b", "'(?<' (position 0) cannot be searched"),
        ("(?>a)", "'(?>' (position 0) cannot be searched"),
        ("(?i)a", "'(?i' (position 0) cannot be searched"),
        ("a++", "a possessive repeat (position 1) cannot be searched"),
        (r"\x41", r"'\x' (position 0) cannot be searched"),
        (r"[\x41]", r"'\x' (position 1) cannot be searched"),
        ("(?:(?:(?:.?){1000}){1000}){1000}", "with its counted repeats written out it has more than 2000 parts"),
        ("a{4000000000}", "with its counted repeats written out it has more than 2000 parts"),
        ("a" * 1025, "1025 characters, and a pattern may have 1024"),
        ("(" * 400 + ")" * 400, "nested too deeply"),
    ],
)
def test_what_is_no_pattern_here(text, says):
    with pytest.raises(PatternError) as caught:
        Pattern(text)
    assert str(caught.value).startswith(says)


def test_nothing_repeated_is_nothing():
    assert Pattern("(?:){4000000000}(?:(?:){9,}){9}a").search("a", Allowance(100))


def test_the_allowance_is_ample():
    """The largest list of overrides, none of which matches, over the towers of a model of 128 layers."""
    allowance, patterns = Allowance(), [Pattern(rf"blk\.{n}\.attn_(q|k|v)\.weight") for n in range(256)]
    for layer in range(0, 128, 16):
        for part in ("up", "down", "gate"):
            assert not any(one.search(f"blk.{layer}.ffn_{part}_exps.weight", allowance) for one in patterns)
    assert (pattern.STEPS - allowance.left) * 16 < pattern.STEPS
