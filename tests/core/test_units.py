import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.core.errors import InputError
from outsize.core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("0", 0), ("1992960", 1992960), ("512 B", 512), ("1KiB", 1024), ("1 kb", 1000), ("2GB", 2_000_000_000),
        ("2GiB", 2 * 2**30), ("1.5 GiB", 3 * 2**29), (".5MiB", 2**19), ("1_000 MB", 10**9), ("3TiB", 3 * 2**40),
        (4096, 4096), ("0.1GB", 100_000_000),
    ],
)  # fmt: skip
def test_sizes_are_read_with_their_unit(text, bytes_):
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize(
    "text", ["", "GiB", "12XB", "-1", "-1GiB", "1e3", "1.2.3GB", "inf", "nan", "1 2", -1, 1.5, None, True]
)
def test_nonsense_is_refused_in_one_sentence(text):
    with pytest.raises(InputError) as caught:
        parse_bytes(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "size"), [("12G", 12 * 2**30), ("1k", 1024), ("7 M", 7 * 2**20)])
def test_a_bare_letter_is_a_power_of_1024(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["16", "0.5", "65_535", "99999.5"])
def test_a_small_number_without_a_unit_is_refused_and_the_units_are_named(text):
    with pytest.raises(InputError, match=f"'{text}' has no unit: write {text}MiB or {text}GiB"):
        parse_bytes(text)


def test_gb_and_gib_differ_by_seven_percent():
    assert parse_bytes("1GiB") / parse_bytes("1GB") == pytest.approx(1.0737, abs=1e-4)


@given(st.integers(0, 2**80))
def test_what_is_printed_reads_back_within_half_a_hundredth(value):
    unit = max(1, 2 ** (10 * min(5, (value.bit_length() - 1) // 10))) if value >= 1024 else 1
    assert abs(parse_bytes(format_bytes(value).replace(",", "")) - value) <= unit / 200 + 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1070596096, "1,021.00 MiB"), (6298009600, "5.87 GiB"), (None, "-"),
     (-2048, "-2.00 KiB")],
)  # fmt: skip
def test_bytes_are_printed_in_powers_of_1024(value, text):
    assert format_bytes(value) == text
