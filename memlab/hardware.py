"""GPUs and links as facts, each with its source.

`gpu("a100-80gb")` and `link("pcie4")` look one up in any case and in the spellings people use; `GPUS` and
`LINKS` hold them all. Capacity is what CUDA reports (`torch.cuda.get_device_properties(0).total_memory`),
which is neither the marketed number of GB nor the same on every machine: driver, ECC and firmware move it by
some 0.3 %, so each card says which report it quotes. Bandwidths are peaks: real copies reach 80-95 % of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from memlab.units import GB, MIB, UnknownNameError, unknown_name

_TFLOPS = 10**12


@dataclass(frozen=True, kw_only=True)
class Link:
    """A path that bytes travel. `bandwidth` is the peak in bytes per second in one direction."""

    name: str
    bandwidth: int
    connects: str
    source: str


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One card as CUDA shows it.

    memory_bytes     total_memory as CUDA reports it; `memory_source` quotes the report
    marketed_bytes   the number on the box, in bytes
    bus_bits, gbps_per_pin   bandwidth in GB/s = bus_bits * gbps_per_pin / 8
    bandwidth        bytes per second, as the maker states it
    flops            dense peak per dtype, FLOP per second (tensor cores but for fp32, fp32 accumulation);
                     a dtype that isn't a key has no hardware for it (bf16 on T4 and V100)
    context_bytes    what a process holds outside the allocator (driver context, kernels); None: no report
                     known, expect 0.14 to 2 GB
    host_link, peer_link   names in LINKS; peer_link is None where GPUs reach each other through the host
    """

    name: str
    memory_bytes: int
    memory_source: str
    marketed_bytes: int
    memory_kind: str
    bus_bits: int
    gbps_per_pin: float
    bandwidth: int
    compute_capability: tuple[int, int]
    flops: Mapping[str, int] = field(hash=False)
    host_link: str
    peer_link: str | None = None
    context_bytes: int | None = None
    context_source: str | None = None
    source: str

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that this card's arithmetic knows."""
        return tuple(self.flops)


def _pcie(transfers: int, lanes: int = 16) -> int:
    """Bytes per second in one direction: 128b/130b coding, one bit a transfer and lane."""
    return round(transfers * 10**9 * lanes * 128 / 130 / 8)


_ALL_LINKS = (
    Link(name="PCIe3", bandwidth=_pcie(8), connects="host and GPU, 16 lanes",
         source="PCI Express 3.0: 8 GT/s a lane, 128b/130b"),
    Link(name="PCIe4", bandwidth=_pcie(16), connects="host and GPU, 16 lanes",
         source="PCI Express 4.0: 16 GT/s a lane, 128b/130b"),
    Link(name="PCIe5", bandwidth=_pcie(32), connects="host and GPU, 16 lanes",
         source="PCI Express 5.0: 32 GT/s a lane, 128b/130b"),
    Link(name="NVLink2", bandwidth=150 * GB, connects="GPU and GPU (V100: 6 links of 25 GB/s)",
         source="NVIDIA Tesla V100 whitepaper: 300 GB/s, both directions summed"),
    Link(name="NVLink3", bandwidth=300 * GB, connects="GPU and GPU (A100: 12 links of 25 GB/s)",
         source="NVIDIA A100 datasheet: 600 GB/s, both directions summed"),
    Link(name="NVLink4", bandwidth=450 * GB, connects="GPU and GPU (H100, H200: 18 links of 25 GB/s)",
         source="NVIDIA H100 datasheet: 900 GB/s, both directions summed"),
    Link(name="NVLink5", bandwidth=900 * GB, connects="GPU and GPU (B200: 18 links of 50 GB/s)",
         source="NVIDIA HGX B200 datasheet: 1.8 TB/s, both directions summed"),
    Link(name="NVLink-bridge", bandwidth=56_250_000_000,
         connects="two workstation cards (RTX 3090, A6000: 4 links)",
         source="NVIDIA Ampere GA102 whitepaper: 4 links of 14.0625 GB/s, 112.5 GB/s both directions summed"),
    Link(name="DDR5-desktop", bandwidth=76_800_000_000, connects="CPU and its memory, two channels",
         source="DDR5-4800: 4.8 GT/s * 8 bytes * 2 channels, reads and writes together"),
    Link(name="DDR5-server", bandwidth=307_200_000_000, connects="one CPU socket and its memory",
         source="DDR5-4800: 4.8 GT/s * 8 bytes * 8 channels, reads and writes together; some 250 GB/s "
         "effective (blocksandfiles.com, 2022-04-23)"),
    Link(name="NVMe", bandwidth=_pcie(16, lanes=4), connects="host and one PCIe 4.0 x4 drive",
         source="PCI Express 4.0, 4 lanes: the interface's ceiling; drives read 5 to 7 GB/s and write less"),
)  # fmt: skip

_HOPPER = {"fp32": 67 * _TFLOPS, "tf32": 494_700 * 10**9, "fp16": 989_400 * 10**9, "bf16": 989_400 * 10**9,
           "fp8": 1_978_900 * 10**9}  # fmt: skip
_A100 = {"fp32": 19_500 * 10**9, "tf32": 156 * _TFLOPS, "fp16": 312 * _TFLOPS, "bf16": 312 * _TFLOPS}
_V100 = {"fp32": 15_700 * 10**9, "fp16": 125 * _TFLOPS}


def _mib(reported: int) -> int:
    """torch prints total_memory in whole MiB, rounded down."""
    return reported * MIB


_ALL_GPUS = (
    GPU(name="A100-40GB", memory_bytes=42_298_834_944,
        memory_source="deviceQuery of an A100-SXM4-40GB (github.com/bottlerocket-os/bottlerocket/pull/3873)",
        marketed_bytes=40 * GB, memory_kind="HBM2", bus_bits=5120, gbps_per_pin=2.43, bandwidth=1_555 * GB,
        compute_capability=(8, 0), flops=_A100, host_link="PCIe4", peer_link="NVLink3",
        source="NVIDIA A100 datasheet, SXM"),
    GPU(name="A100-80GB", memory_bytes=85_198_045_184,
        memory_source="deviceQuery of an A100-SXM4-80GB (gist.github.com/gengwg); other machines "
        "report 84.99 to 85.20 GB",
        marketed_bytes=80 * GB, memory_kind="HBM2e", bus_bits=5120, gbps_per_pin=3.186, bandwidth=2_039 * GB,
        compute_capability=(8, 0), flops=_A100, host_link="PCIe4", peer_link="NVLink3",
        source="NVIDIA A100 datasheet, SXM (the PCIe card has 1,935 GB/s)"),
    GPU(name="H100-80GB", memory_bytes=85_028_896_768,
        memory_source="deviceQuery of an H100 80GB HBM3 under driver 12.8; other machines "
        "report 85.02 to 85.05 GB",
        marketed_bytes=80 * GB, memory_kind="HBM3", bus_bits=5120, gbps_per_pin=5.234, bandwidth=3_350 * GB,
        compute_capability=(9, 0), flops=_HOPPER, host_link="PCIe5", peer_link="NVLink4",
        source="NVIDIA H100 datasheet, SXM5 (the PCIe card has HBM2e and about 2 TB/s)"),
    GPU(name="H200", memory_bytes=_mib(143_156),
        memory_source="torch.cuda.get_device_properties of an H200, printed as 143156 MB (whole "
        "MiB, rounded down)",
        marketed_bytes=141 * GB, memory_kind="HBM3e", bus_bits=6144, gbps_per_pin=6.25, bandwidth=4_800 * GB,
        compute_capability=(9, 0), flops=_HOPPER, host_link="PCIe5", peer_link="NVLink4",
        source="NVIDIA H200 datasheet, SXM; the rate per pin follows from bandwidth and bus"),
    GPU(name="B200", memory_bytes=_mib(182_642),
        memory_source="torch.cuda.get_device_properties of a B200, printed as 182642 MB (whole "
        "MiB, rounded down); another machine reports 182631",
        marketed_bytes=180 * GB, memory_kind="HBM3e", bus_bits=7680, gbps_per_pin=7.992, bandwidth=7_672 * GB,
        compute_capability=(10, 0),
        flops={"fp32": 75 * _TFLOPS, "tf32": 1_125 * _TFLOPS, "fp16": 2_250 * _TFLOPS,
               "bf16": 2_250 * _TFLOPS, "fp8": 4_500 * _TFLOPS},
        host_link="PCIe5", peer_link="NVLink5",
        source="NVIDIA HGX B200 datasheet; bus and memory clock as the driver reports them "
        "(github.com/pytorch/ao/pull/4002), marketed as 8 TB/s"),
    GPU(name="RTX-3090", memory_bytes=25_447_170_048,
        memory_source="deviceQuery under driver 11.8; other machines report 25.21 to 25.45 GB",
        marketed_bytes=24 * GB, memory_kind="GDDR6X", bus_bits=384, gbps_per_pin=19.5, bandwidth=936 * GB,
        compute_capability=(8, 6),
        flops={"fp32": 35_600 * 10**9, "tf32": 35_600 * 10**9, "fp16": 71 * _TFLOPS, "bf16": 71 * _TFLOPS},
        host_link="PCIe4", peer_link="NVLink-bridge", source="NVIDIA Ampere GA102 whitepaper"),
    GPU(name="RTX-4090", memory_bytes=25_386_352_640,
        memory_source="deviceQuery under driver 12.4; other machines report 25.25 to 25.76 GB",
        marketed_bytes=24 * GB, memory_kind="GDDR6X", bus_bits=384, gbps_per_pin=21, bandwidth=1_008 * GB,
        compute_capability=(8, 9),
        flops={"fp32": 82_600 * 10**9, "tf32": 82_600 * 10**9, "fp16": 165_200 * 10**9,
               "bf16": 165_200 * 10**9, "fp8": 330_300 * 10**9},
        host_link="PCIe4", source="NVIDIA Ada GPU architecture whitepaper"),
    GPU(name="RTX-5090", memory_bytes=33_680_457_728,
        memory_source="deviceQuery under driver 12.8 (github.com/NVIDIA/nccl/issues/1637)",
        marketed_bytes=32 * GB, memory_kind="GDDR7", bus_bits=512, gbps_per_pin=28, bandwidth=1_792 * GB,
        compute_capability=(12, 0),
        flops={"fp32": 104_800 * 10**9, "tf32": 104_800 * 10**9, "fp16": 209_500 * 10**9,
               "bf16": 209_500 * 10**9, "fp8": 419 * _TFLOPS},
        host_link="PCIe5", source="NVIDIA RTX Blackwell GPU architecture whitepaper"),
    GPU(name="T4", memory_bytes=15_835_660_288,
        memory_source="deviceQuery of a Tesla T4 under driver 12.2; other machines report 15.65 to 15.84 GB",
        marketed_bytes=16 * GB, memory_kind="GDDR6", bus_bits=256, gbps_per_pin=10, bandwidth=320 * GB,
        compute_capability=(7, 5), flops={"fp32": 8_100 * 10**9, "fp16": 65 * _TFLOPS},
        host_link="PCIe3", context_bytes=round(140.875 * MIB),
        context_source="process minus reserved memory, the same in every unquantised run of the FitCheck T4 "
        "archive (PyPI fitcheck-llm 0.3.1, torch 2.10 and 2.14)",
        source="NVIDIA T4 datasheet"),
    GPU(name="L4", memory_bytes=23_612_293_120, memory_source="deviceQuery under driver 12.0",
        marketed_bytes=24 * GB, memory_kind="GDDR6", bus_bits=192, gbps_per_pin=12.5, bandwidth=300 * GB,
        compute_capability=(8, 9),
        flops={"fp32": 30_300 * 10**9, "tf32": 60 * _TFLOPS, "fp16": 121 * _TFLOPS, "bf16": 121 * _TFLOPS,
               "fp8": 242_500 * 10**9},
        host_link="PCIe4", source="NVIDIA L4 datasheet (dense: half of the sparse rates that it prints)"),
    GPU(name="V100-16GB", memory_bytes=16_928_342_016,
        memory_source="deviceQuery of a Tesla V100-SXM2-16GB under driver 12.4; other machines "
        "report 16.91 to 16.95 GB",
        marketed_bytes=16 * GB, memory_kind="HBM2", bus_bits=4096, gbps_per_pin=1.754, bandwidth=900 * GB,
        compute_capability=(7, 0), flops=_V100, host_link="PCIe3", peer_link="NVLink2",
        context_bytes=1343 * MIB,
        context_source="device memory in use after one small tensor (its 2 MiB segment included), driver 460 "
        "with CUDA 11.2, which loaded every kernel at once: Hugging Face, Model training anatomy",
        source="NVIDIA V100 datasheet, SXM2"),
    GPU(name="V100-32GB", memory_bytes=34_089_730_048,
        memory_source="deviceQuery of a Tesla V100-SXM2-32GB under driver 11.4",
        marketed_bytes=32 * GB, memory_kind="HBM2", bus_bits=4096, gbps_per_pin=1.754, bandwidth=900 * GB,
        compute_capability=(7, 0), flops=_V100, host_link="PCIe3", peer_link="NVLink2",
        source="NVIDIA V100 datasheet, SXM2"),
    GPU(name="RTX-A6000", memory_bytes=_mib(48_676),
        memory_source="torch.cuda.get_device_properties of an RTX A6000, printed as 48676 MB (whole MiB, "
        "rounded down); another machine reports 51,160,023,040 bytes",
        marketed_bytes=48 * GB, memory_kind="GDDR6", bus_bits=384, gbps_per_pin=16, bandwidth=768 * GB,
        compute_capability=(8, 6),
        flops={"fp32": 38_700 * 10**9, "tf32": 77_400 * 10**9, "fp16": 154_800 * 10**9,
               "bf16": 154_800 * 10**9},
        host_link="PCIe4", peer_link="NVLink-bridge", source="NVIDIA RTX A6000 datasheet"),
    GPU(name="A10G", memory_bytes=_mib(22_587),
        memory_source="torch.cuda.get_device_properties of an A10G, printed as 22587 MB (whole "
        "MiB, rounded down)",
        marketed_bytes=24 * GB, memory_kind="GDDR6", bus_bits=384, gbps_per_pin=12.5, bandwidth=600 * GB,
        compute_capability=(8, 6),
        flops={"fp32": 35 * _TFLOPS, "tf32": 35 * _TFLOPS, "fp16": 70 * _TFLOPS, "bf16": 70 * _TFLOPS},
        host_link="PCIe4", source="NVIDIA A10G datasheet (AWS G5)"),
)  # fmt: skip

#: Every card and every link by name.
GPUS: dict[str, GPU] = {card.name: card for card in _ALL_GPUS}
LINKS: dict[str, Link] = {path.name: path for path in _ALL_LINKS}

# Parts of names that don't tell two of these cards apart. 'PCIe' isn't among them: those cards are slower.
_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|rtx|sxm\d?|hbm\d\w?")


def _words(name: str) -> tuple[str, ...]:
    """'NVIDIA A100-SXM4-80GB' -> ('a100', '80'); 'rtx4090' -> ('4090',)."""
    text = re.sub(r"(\d+)\s*(?:gib|gb|g)\b", r" \1 ", name.lower().replace("_", " ").replace("-", " "))
    words = (_NOISE.sub("", word) for word in text.split())
    return tuple(word for word in words if word)


def gpu(name: str | GPU) -> GPU:
    """The card called `name`: any case, with or without hyphens, also CUDA's own name for it.

    Raises UnknownNameError with near matches, or with all cards that an incomplete name ('a100') could mean.
    """
    if isinstance(name, GPU):
        return name
    wanted = _words(str(name))
    fits = [card for card in _ALL_GPUS if wanted and wanted == _words(card.name)[: len(wanted)]]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise UnknownNameError(f"GPU {name!r} is ambiguous: {' or '.join(card.name for card in fits)}")
    raise unknown_name("GPU", name, GPUS)


def link(name: str | Link) -> Link:
    """The link called `name`, in any case, with or without hyphens and 'x16'. Raises UnknownNameError."""
    if isinstance(name, Link):
        return name
    wanted = re.sub(r"x16|[-_. ]|gen", "", str(name).lower())
    fits = [path for path in _ALL_LINKS if wanted and path.name.lower().replace("-", "").startswith(wanted)]
    exact = [path for path in fits if path.name.lower().replace("-", "") == wanted]
    if len(exact or fits) == 1:
        return (exact or fits)[0]
    if fits:
        raise UnknownNameError(f"link {name!r} is ambiguous: {' or '.join(path.name for path in fits)}")
    raise unknown_name("link", name, LINKS)
