"""The text of one request, token by token.

Owns: stop strings and what has to be held back because of them. Must not know where the text goes, nor how tokens become characters: the
tokenizer's incremental decoder does that, and holds the bytes of an unfinished character itself.

What is delivered depends on the text alone, not on how tokens cut it: generation stops where the text, read character by character, first
ends with a stop string, and the longest stop string that ends there is cut off.
"""

from __future__ import annotations

from typing import Protocol


class Decoder(Protocol):
    """What is needed of the tokenizer's incremental decoder."""

    def push(self, token_id: int, /) -> str: ...

    def flush(self) -> str: ...


class StopScanner:
    """Holds back text only while it could become a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._reach = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """Text to deliver now, and whether a stop string ended (never one that ends in text pushed with `armed` False)."""
        if not self._stops:
            return text, False
        known = len(self._held)
        text = self._held + text
        if armed:
            cut = self._first_stop(text, known)
            if cut is not None:
                self._held = ""
                return text[:cut], True
        keep = self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back: no stop string will come of it."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str, known: int) -> int | None:
        """Where the stop string begins that ends first, and beyond the first `known` characters; of several ending together the longest."""
        found = ((text.find(stop, max(0, known - len(stop) + 1)), len(stop)) for stop in self._stops)
        ends = [(begin + length, begin) for begin, length in found if begin >= 0]
        return min(ends)[1] if ends else None

    def _possible_stop(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string without being all of it."""
        for length in range(min(self._reach, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Tokens in, deliverable text out."""

    def __init__(self, decoder: Decoder, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._scanner = StopScanner(stops)
        self._stopped = False

    def push(self, token_id: int, armed: bool = True) -> tuple[str, bool]:
        """The text that this token lets through, and whether a stop string ended: then it is the last text."""
        text, self._stopped = self._scanner.push(self._decoder.push(token_id), armed)
        return text, self._stopped

    def finish(self) -> tuple[str, bool]:
        """The rest (an unfinished character as the decoder writes it, what was held back), and whether a stop string has ended."""
        if self._stopped:
            return "", True
        text, self._stopped = self._scanner.push(self._decoder.flush())
        return text + self._scanner.flush(), self._stopped
