"""The bytes of a frame header, which all versions and implementations must write identically."""

from __future__ import annotations

from aiocoll.transport.frame import HEADER, HEADER_SIZE, SEGMENT, FrameKind


def test_frame_header_has_40_bytes_in_little_endian_order() -> None:
    assert HEADER_SIZE == 40
    numbers = [0x05060708090A0B0C, 0x0D0E0F1011121314, 0x15161718, 0x191A1B1C, 0x1D1E1F20, 0x21222324]
    header = HEADER.pack(1, 2, 0x0304, *numbers)
    assert header.hex(" ", 8) == " ".join(
        ["0102040300000000", "0c0b0a0908070605", "14131211100f0e0d", "181716151c1b1a19", "201f1e1d24232221"]
    )


def test_frame_kinds_have_fixed_numbers() -> None:
    assert {kind.name: int(kind) for kind in FrameKind} == {
        "DATA": 1,
        "READY": 2,
        "GRANT": 3,
        "WINDOW": 4,
        "CONTROL": 5,
    }


def test_segment_size_is_a_multiple_of_the_largest_element_size() -> None:
    assert SEGMENT % 16 == 0
