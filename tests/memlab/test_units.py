"""Bytes in and out of text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.units import (
    DTYPE_BYTES,
    GB,
    GIB,
    MIB,
    UnknownNameError,
    dtype_bytes,
    format_bytes,
    format_count,
    format_gb,
    parse_bytes,
    unknown_name,
)


def test_binary_and_decimal_units_differ_and_say_which():
    # The memory of an A100-80GB: the same bytes are 85 GB and 79 GiB.
    assert format_gb(85_198_045_184) == "85.20 GB"
    assert format_bytes(85_198_045_184) == "79.35 GiB"


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (-MIB, "-1.00 MiB"), (3 * GIB // 2, "1.50 GiB")],
)
def test_format_bytes(n, text):
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(7, "7"), (61_706, "61.71 K"), (124_439_808, "124.4 M"), (68_976_648_192, "68.98 B")]
)
def test_format_count(n, text):
    assert format_count(n) == text


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("80 GB", 80 * GB),
        ("1.5GiB", 3 * GIB // 2),
        ("512", 512),
        (512, 512),
        ("2,048 MiB", 2 * GIB),
        ("1e3 kb", 10**6),
    ],
)
def test_parse_bytes(text, n):
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["", "GB", "-1 GB", "1 GBit", "1..5 GB", "many", -5, True, None])
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(ValueError) as error:
        parse_bytes(text)
    assert "\n" not in str(error.value)


@given(st.integers(0, 2**60))
def test_bytes_survive_being_written_out(n):
    assert parse_bytes(str(n)) == n
    assert parse_bytes(f"{n} bytes") == n


@given(st.integers(0, 2**50))
def test_formatted_sizes_parse_back_to_the_printed_digits(n):
    assert abs(parse_bytes(format_bytes(n)) - n) <= max(0.005 * max(n, 1), 0)
    assert abs(parse_bytes(format_gb(n)) - n) <= max(0.005 * max(n, 1), 0)


def test_dtypes():
    assert (dtype_bytes("fp32"), dtype_bytes("bf16"), dtype_bytes("uint8")) == (4, 2, 1)
    with pytest.raises(UnknownNameError, match="did you mean bf16"):
        dtype_bytes("bf61")


def test_an_unknown_name_shows_what_is_near_or_all_there_is():
    assert "did you mean gpt2?" in str(unknown_name("model", "GTP2", ["gpt2", "resnet50"]))
    assert "known: gpt2, resnet50" in str(unknown_name("model", "xyz", ["gpt2", "resnet50"]))
    assert set(DTYPE_BYTES) >= {"fp32", "fp16", "bf16", "int64", "bool"}
