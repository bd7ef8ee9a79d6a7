"""The patterns of placement overrides: Python's regular expressions, less what cannot be searched in bounded time.

Owns: what a pattern may hold, and the search for it in a tensor's name. Must not know what a match means.

Python's own matcher tries one way after the other, and a pattern of ten characters can keep it busy for ever, with the interpreter's lock
held. This one follows all ways at once, character by character, so a search costs at most pattern times name, and the steps of many
searches are counted against one allowance. It has no clock: what is refused on one machine is refused on all.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, Final

MAX_CHARACTERS: Final = 1024
MAX_INSTRUCTIONS: Final = 2000  # after counted repeats were written out
STEPS: Final = 4_000_000
"""Steps that placing one model may take: thousands of times what any list of overrides needs, and a few seconds at worst."""

_ASSERTIONS: Final = {"A": "start", "Z": "end", "b": "boundary", "B": "no boundary"}
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_GROUP: Final = re.compile(r"\(\?(?::|=|!|P<\w+>)")
_COUNTS: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")

Accepts = Callable[[str], bool]


class PatternError(ValueError):
    """The pattern cannot be used; the text says why."""


class OutOfSteps(Exception):  # noqa: N818 - not a mistake of the program's
    """The allowance is used up."""


class Allowance:
    """Steps that are left; shared by the searches of one placement."""

    def __init__(self, steps: int = STEPS) -> None:
        self.left = steps


class Pattern:
    """A compiled pattern. PatternError where it is none."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise PatternError(f"{len(text)} characters, and a pattern may have {MAX_CHARACTERS}")
        try:
            _check_syntax(text)
            self._program = _Emitter().finished(_Parser(text).whole())
        except RecursionError:
            raise PatternError("nested too deeply") from None

    def search(self, name: str, allowance: Allowance) -> bool:
        """Whether the pattern is found anywhere in `name`. OutOfSteps when that would take more than is allowed."""
        return self._run(name, 0, 0, True, {}, allowance)

    def _run(self, name: str, start: int, at: int, anywhere: bool, known: dict[tuple[int, int], bool], allowance: Allowance) -> bool:
        """Follow the program from instruction `start` at position `at`; `known` keeps the answers of lookaheads."""
        program = self._program
        now: list[int] = [start]
        for position in range(at, len(name) + 1):
            seen: set[int] = set()
            following: list[int] = []
            if anywhere and position > at:
                now.append(start)
            while now:
                pc = now.pop()
                if pc in seen:
                    continue
                seen.add(pc)
                kind, argument, other = program[pc]
                if kind == "character":
                    if position < len(name) and argument(name[position]):
                        following.append(pc + 1)
                elif kind == "split":
                    now += (argument, other)
                elif kind == "match":
                    return True
                elif kind == "look":
                    if (pc, position) not in known:
                        known[pc, position] = self._run(name, pc + 1, position, False, known, allowance)
                    if known[pc, position] is argument:
                        now.append(other)
                elif _holds(kind, name, position):
                    now.append(pc + 1)
            allowance.left -= len(seen)
            if allowance.left < 0:
                raise OutOfSteps
            if not following and not anywhere:
                return False
            now = following
        return False


def _check_syntax(text: str) -> None:
    try:
        with warnings.catch_warnings():  # a dubious pattern must not make Python speak on stderr
            warnings.simplefilter("ignore")
            re.compile(text)
    except (re.error, OverflowError) as error:
        raise PatternError(str(error)) from None


def _holds(assertion: str, name: str, position: int) -> bool:
    if assertion == "start":
        return position == 0
    if assertion == "end":
        return position == len(name)
    if assertion == "line end":
        return position == len(name) or (position == len(name) - 1 and name[-1] == "\n")
    before = position > 0 and _is_word(name[position - 1])
    after = position < len(name) and _is_word(name[position])
    return (before is not after) is (assertion == "boundary")


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _negated(accepts: Accepts) -> Accepts:
    return lambda character: not accepts(character)


def _one(character: str) -> Accepts:
    return character.__eq__


_CATEGORIES: Final[dict[str, Accepts]] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": _is_word,
    "D": _negated(str.isdecimal),
    "S": _negated(str.isspace),
    "W": _negated(_is_word),
}


class _Parser:
    """From text that Python accepts to a tree: ("character", accepts), ("all", parts), ("any", parts), ("repeat", part, least, most),
    ("look", part, wanted), ("assert", kind)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> tuple[Any, ...]:
        return self._alternatives()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        character = self._peek()
        self._at += 1
        return character

    def _refuse(self, what: str, at: int) -> PatternError:
        return PatternError(f"{what} (position {at}) cannot be searched in bounded time and is not supported")

    def _alternatives(self) -> tuple[Any, ...]:
        parts = [self._sequence()]
        while self._peek() == "|":
            self._take()
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else ("any", parts)

    def _sequence(self) -> tuple[Any, ...]:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return ("all", parts)

    def _repeated(self, part: tuple[Any, ...]) -> tuple[Any, ...]:
        at = self._at
        counts = _COUNTS.match(self._text, at)
        if self._peek() in ("*", "+", "?"):
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._take()]
        elif counts is not None and counts[0] != "{}":
            self._at = counts.end()
            least = int(counts[1] or 0)
            most = (int(counts[3]) if counts[3] else None) if counts[2] else least
        else:
            return part
        if self._peek() == "?":  # a lazy repeat finds the same names
            self._take()
        elif self._peek() == "+":
            raise self._refuse("a possessive repeat", at)
        return ("repeat", part, least, most)

    def _atom(self) -> tuple[Any, ...]:
        at = self._at
        character = self._take()
        if character == "(":
            return self._group(at)
        if character == "[":
            return ("character", self._class())
        if character == ".":
            return ("character", "\n".__ne__)
        if character in "^$":
            return ("assert", {"^": "start", "$": "line end"}[character])
        if character != "\\":
            return ("character", _one(character))
        if self._peek() in _ASSERTIONS:
            return ("assert", _ASSERTIONS[self._take()])
        return ("character", self._escape(at))

    def _group(self, at: int) -> tuple[Any, ...]:
        kind = ""
        if self._peek() == "?":
            opening = _GROUP.match(self._text, at)
            if opening is None:
                raise self._refuse(f"'{self._text[at : at + 3]}'", at)
            kind, self._at = self._text[at + 2], opening.end()
        part = self._alternatives()
        self._take()
        return ("look", part, kind == "=") if kind in ("=", "!") else part

    def _escape(self, at: int) -> Accepts:
        character = self._take()
        if character in _CATEGORIES:
            return _CATEGORIES[character]
        if character in _CONTROLS:
            return _one(_CONTROLS[character])
        if character.isalnum():
            raise self._refuse(f"'\\{character}'", at)
        return _one(character)

    def _class(self) -> Accepts:
        negated = self._peek() == "^"
        if negated:
            self._take()
        ranges: list[tuple[str, str]] = []
        categories: list[Accepts] = []
        first = True
        while first or self._peek() != "]":
            first = False
            low = self._class_member(categories)
            if low is None:
                continue
            high = low
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._take()
                high = self._class_member(categories) or low
            ranges.append((low, high))
        self._take()

        def accepts(character: str) -> bool:
            return any(low <= character <= high for low, high in ranges) or any(accept(character) for accept in categories)

        return _negated(accepts) if negated else accepts

    def _class_member(self, categories: list[Accepts]) -> str | None:
        """One character of a class, or None for a category, which is added to those."""
        at = self._at
        character = self._take()
        if character != "\\":
            return character
        escaped = self._peek()
        if escaped == "b":
            self._take()
            return "\b"
        if escaped in _CATEGORIES:
            categories.append(_CATEGORIES[self._take()])
            return None
        if escaped in _CONTROLS:
            return _CONTROLS[self._take()]
        if escaped.isalnum():
            raise self._refuse(f"'\\{escaped}'", at)
        return self._take()


class _Emitter:
    """From the tree to instructions (kind, argument, other), which fall through to the next but for split and look."""

    def __init__(self) -> None:
        self._program: list[tuple[str, Any, int]] = []

    def finished(self, tree: tuple[Any, ...]) -> list[tuple[str, Any, int]]:
        self._write(tree)
        self._add("match")
        return self._program

    def _add(self, kind: str, argument: Any = None, other: int = 0) -> int:
        if len(self._program) >= MAX_INSTRUCTIONS:
            raise PatternError(f"with its counted repeats written out it has more than {MAX_INSTRUCTIONS} parts")
        self._program.append((kind, argument, other))
        return len(self._program) - 1

    def _write(self, tree: tuple[Any, ...]) -> None:
        kind, what, *more = tree
        if kind == "character":
            self._add("character", what)
        elif kind == "assert":
            self._add(what)
        elif kind == "all":
            for part in what:
                self._write(part)
        elif kind == "any":
            self._write_any(what)
        elif kind == "look":
            at = self._add("look")
            self._write(what)
            self._add("match")
            self._program[at] = ("look", more[0], len(self._program))
        else:
            self._write_repeat(what, *more)

    def _write_any(self, parts: list[tuple[Any, ...]]) -> None:
        ends = []
        for part in parts[:-1]:
            fork = self._add("split")
            self._write(part)
            ends.append(self._add("split"))
            self._program[fork] = ("split", fork + 1, len(self._program))
        self._write(parts[-1])
        for end in ends:
            self._program[end] = ("split", len(self._program), len(self._program))

    def _write_repeat(self, part: tuple[Any, ...], least: int, most: int | None) -> None:
        for _ in range(least):
            before = len(self._program)
            self._write(part)
            if len(self._program) == before:  # nothing, repeated
                return
        if most is None:
            fork = self._add("split")
            self._write(part)
            self._add("split", fork, fork)
            self._program[fork] = ("split", fork + 1, len(self._program))
            return
        forks = []
        for _ in range(least, most):
            forks.append(self._add("split"))
            self._write(part)
        for fork in forks:
            self._program[fork] = ("split", fork + 1, len(self._program))
