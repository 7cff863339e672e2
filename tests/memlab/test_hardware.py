"""Cards and links: facts that hold together, and names as people type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.hardware import GPUS, LINKS, gpu, link
from memlab.units import DTYPE_BYTES, GB, UnknownNameError

ISSUED = [
    "A100-40GB",
    "A100-80GB",
    "H100-80GB",
    "H200",
    "B200",
    "RTX-3090",
    "RTX-4090",
    "RTX-5090",
    "T4",
    "L4",
    "V100-16GB",
    "V100-32GB",
    "RTX-A6000",
    "A10G",
]


def test_every_card_that_the_course_names_is_there():
    assert set(GPUS) == set(ISSUED)


@pytest.mark.parametrize("card", GPUS.values(), ids=lambda card: card.name)
def test_a_card_is_consistent(card):
    # Bandwidth follows from bus and rate; makers round it to three digits.
    assert card.bus_bits * card.gbps_per_pin / 8 * 1e9 == pytest.approx(card.bandwidth, rel=0.005)
    # CUDA shows at least 91 % (ECC on GDDR6 and driver take the rest) and at most 7.4 % more ("GB" is GiB).
    assert 0.91 < card.memory_bytes / card.marketed_bytes < 1.074
    assert card.memory_source and card.source
    assert (card.context_bytes is None) == (card.context_source is None)
    assert card.host_link in LINKS
    assert card.peer_link is None or card.peer_link in LINKS
    assert set(card.dtypes) <= set(DTYPE_BYTES)
    assert isinstance(card.memory_bytes, int) and isinstance(card.bandwidth, int)
    assert hash(card) == hash(gpu(card.name))


def test_bf16_arithmetic_came_with_ampere():
    for card in GPUS.values():
        assert ("bf16" in card.dtypes) == (card.compute_capability >= (8, 0)), card.name
        assert ("fp8" in card.dtypes) == (card.compute_capability >= (8, 9)), card.name


def test_known_numbers():
    assert gpu("a100-80gb").memory_bytes == 85_198_045_184  # deviceQuery
    assert gpu("a100-80gb").bandwidth == 2_039 * GB
    assert gpu("a100-40gb").bandwidth == 1_555 * GB
    assert gpu("h100-80gb").bandwidth == 3_350 * GB
    assert gpu("rtx-4090").bandwidth == 1_008 * GB
    assert link("pcie4").bandwidth == 31_507_692_308  # 16 GT/s * 16 lanes * 128/130 / 8
    # Makers sum both directions: 600 and 900 GB/s.
    assert link("nvlink3").bandwidth == 300 * GB and link("nvlink4").bandwidth == 450 * GB


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a100-80gb", "A100-80GB"),
        ("A100 80GB", "A100-80GB"),
        ("a100_80g", "A100-80GB"),
        ("a100-80", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("h100", "H100-80GB"),
        ("4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("Tesla T4", "T4"),
        ("a6000", "RTX-A6000"),
        ("RTX A6000", "RTX-A6000"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("a10g", "A10G"),
    ],
)
def test_spellings(typed, name):
    assert gpu(typed).name == name


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("a100", "ambiguous: A100-40GB or A100-80GB"),
        ("V100", "ambiguous: V100-16GB or V100-32GB"),
        ("a10", "did you mean A10G"),  # another card, not a short name of this one
        ("rtx-4080", "did you mean RTX-4090"),
        ("H100 PCIe", "unknown GPU"),  # a slower card: must not pass for the SXM one
        ("", "unknown GPU"),
        ("nvidia", "unknown GPU"),
    ],
)
def test_a_name_that_fits_none_or_several_is_refused(typed, said):
    with pytest.raises(UnknownNameError, match=said) as error:
        gpu(typed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("PCIe4", "PCIe4"),
        ("pcie gen5 x16", "PCIe5"),
        ("NVLINK-4", "NVLink4"),
        ("nvme", "NVMe"),
        ("ddr5-server", "DDR5-server"),
    ],
)
def test_link_spellings(typed, name):
    assert link(typed).name == name


def test_link_names_that_fit_none_or_several():
    with pytest.raises(UnknownNameError, match="ambiguous: DDR5-desktop or DDR5-server"):
        link("ddr5")
    with pytest.raises(UnknownNameError, match="unknown link"):
        link("carrier pigeon")


def test_a_card_or_link_passes_through():
    assert gpu(GPUS["T4"]) is GPUS["T4"]
    assert link(LINKS["PCIe3"]) is LINKS["PCIe3"]


@given(st.sampled_from(sorted(GPUS)), st.integers(0, 2**16))
def test_any_case_finds_the_same_card(name, bits):
    typed = "".join(c.upper() if bits >> i & 1 else c.lower() for i, c in enumerate(name))
    assert gpu(typed).name == name


@given(st.text(max_size=30))
def test_any_text_is_a_card_or_a_one_line_error(text):
    try:
        assert gpu(text).name in GPUS
    except UnknownNameError as error:
        assert str(error)
