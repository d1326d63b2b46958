"""The bytes of a frame, as other versions and languages would write them."""

from __future__ import annotations

from aiocoll.transport.frame import HEADER, HEADER_SIZE, SEGMENT, FrameKind


def test_the_header_is_32_bytes_little_endian() -> None:
    assert HEADER_SIZE == 32
    header = HEADER.pack(1, 2, 0x0304, 0x05060708, 0x090A0B0C0D0E0F10, 0x11121314, 0x15161718, 0x191A1B1C, 0x1D1E1F20)
    assert header.hex() == "01020403080706" + "05100f0e0d0c0b0a09141312111817" + "16151c1b1a19201f1e1d"


def test_kinds_have_fixed_numbers() -> None:
    assert {kind.name: int(kind) for kind in FrameKind} == {
        "DATA": 1,
        "READY": 2,
        "GRANT": 3,
        "WINDOW": 4,
        "CONTROL": 5,
    }


def test_segments_keep_elements_whole() -> None:
    assert SEGMENT % 16 == 0
