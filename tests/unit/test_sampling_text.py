"""Stop strings against a naive reader that looks at the whole text after every character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeTokenizer
from vllm_cpp.sampling import StopScanner, TextStream

texts = st.text("ab€", max_size=24)
stop_sets = st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def naive(text, stops, unarmed=0):
    """The text before the first stop string that ends beyond `unarmed` characters, and whether there is one."""
    for end in range(unarmed + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


@st.composite
def cut_texts(draw):
    """A text and the pieces it comes in."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(deadline=None)
@given(cut_texts(), stop_sets)
def test_any_cut_of_the_text_stops_at_the_same_place(cut, stops):
    text, pieces = cut
    scanner = StopScanner(stops)
    delivered, stopped = "", False
    for piece in pieces:
        part, stopped = scanner.push(piece)
        delivered += part
        if stopped:
            break
    if not stopped:
        delivered += scanner.flush()
    assert (delivered, stopped) == naive(text, stops)


@settings(deadline=None)
@given(texts, stop_sets, st.booleans())
def test_no_more_is_held_back_than_could_become_a_stop_string(text, stops, armed):
    scanner = StopScanner(stops)
    delivered = ""
    for index, character in enumerate(text):
        part, stopped = scanner.push(character, armed)
        delivered += part
        if stopped:
            break
        held = text[len(delivered) : index + 1]
        assert held == "" or any(len(stop) > len(held) and stop.startswith(held) for stop in stops)
    else:
        assert delivered + scanner.flush() == text


@settings(deadline=None)
@given(cut_texts(), stop_sets, st.integers(0, 8))
def test_what_ends_while_unarmed_does_not_stop(cut, stops, unarmed_pieces):
    text, pieces = cut
    scanner = StopScanner(stops)
    delivered, stopped = "", False
    for index, piece in enumerate(pieces):
        part, stopped = scanner.push(piece, armed=index >= unarmed_pieces)
        delivered += part
        if stopped:
            break
    if not stopped:
        delivered += scanner.flush()
    assert (delivered, stopped) == naive(text, stops, unarmed=len("".join(pieces[:unarmed_pieces])))


@settings(deadline=None)
@given(st.text("ab€😀", max_size=12), stop_sets)
def test_stop_strings_through_bytes_of_characters(text, stops):
    stream = TextStream(FakeTokenizer().incremental(), stops)
    delivered, stopped = "", False
    for byte in text.encode():
        part, stopped = stream.push(byte)
        part.encode()
        delivered += part
        if stopped:
            break
    rest, stopped = stream.finish()
    assert (delivered + rest, stopped) == naive(text, stops)


def test_an_unfinished_character_and_held_text_come_at_the_end_in_order():
    stream = TextStream(FakeTokenizer().incremental(), ("xyz",))
    parts = [stream.push(byte)[0] for byte in b"axy\xe2\x82"]
    assert parts == ["a", "", "", "", ""]
    assert stream.finish() == ("xy\ufffd", False)


def test_nothing_comes_after_a_stop_string():
    stream = TextStream(FakeTokenizer().incremental(), ("x",))
    assert [stream.push(byte) for byte in b"ax"] == [("a", False), ("", True)]
    assert stream.finish() == ("", True)
