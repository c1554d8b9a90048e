"""Devices by name, with their makers' figures: what roofs of speed and limits of memory are taken from."""

from typing import NamedTuple


class Hardware(NamedTuple):
    """What all `devices` of an entry have together; makers' figures, bytes in decimal units."""

    devices: int
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second of that memory."""
    flops: float
    """Dense bfloat16 operations a second."""
    link: float
    """Bytes a second that leave a device for others of its slice or machine, all its links in one direction."""
    source: str

    def roofline(self, flops: float, bytes: float) -> float:
        """Seconds at least, by arithmetic or by memory."""
        return max(flops / self.flops, bytes / self.bandwidth)


def _devices(count: int, memory: float, bandwidth: float, flops: float, link: float, source: str) -> Hardware:
    return Hardware(count, count * memory, count * bandwidth, count * flops, count * link, source)


HARDWARE = {
    "a100": _devices(1, 80e9, 2.039e12, 312e12, 300e9, "NVIDIA A100 80GB SXM data sheet"),
    "h100": _devices(1, 80e9, 3.35e12, 989e12, 450e9, "NVIDIA H100 SXM data sheet"),
    "h200": _devices(1, 141e9, 4.8e12, 989e12, 450e9, "NVIDIA H200 SXM data sheet"),
    "b200": _devices(1, 180e9, 7.7e12, 2.25e15, 900e9, "NVIDIA HGX B200 data sheet"),
    "gb200x4": _devices(4, 186e9, 8e12, 2.5e15, 900e9, "NVIDIA GB200 NVL72 data sheet, a 72nd of it times 4"),
    "v5e": _devices(1, 16e9, 0.819e12, 197e12, 200e9, "Google Cloud TPU v5e"),
    "v5p": _devices(1, 95e9, 2.765e12, 459e12, 600e9, "Google Cloud TPU v5p"),
    "v6e": _devices(1, 32e9, 1.64e12, 918e12, 400e9, "Google Cloud TPU v6e"),
}
"""Makers give the links of both directions together: NVLink 600, 900 and 1,800 GB/s, TPU 400, 1,200 and 800 GB/s."""
_KINDS = {
    **{f"TPU {kind}": "v5e" for kind in ("v5 lite", "v5e")},
    **{f"TPU {kind}": "v5p" for kind in ("v5", "v5p")},
    **{f"TPU {kind}": "v6e" for kind in ("v6 lite", "v6e")},
    **{f"NVIDIA A100-SXM4-{memory}GB": "a100" for memory in (40, 80)},
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200x4",
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 operations a second of one device by JAX's name of its kind; None where that is not known."""
    found = HARDWARE.get(_KINDS.get(device_kind, ""))
    return None if found is None else found.flops / found.devices
