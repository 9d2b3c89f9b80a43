"""The catalog of GPUs: rows of gpus.json as `Gpu` records, found by the names people write."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.units import GIB, MIB, parse_bytes
from napkinmath.base.values import refuse_several
from napkinmath.config.hardware import Display, Gpu, GpuLink, Hardware, HostLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_VENDOR_WORDS = ("nvidia", "amd", "geforce", "tesla", "instinct", "graphics", "gpu", "corporation")
# Without these a name means the same thing: "4090", "rtx4090", "RX 7900 XTX", "Radeon RX 7900 XTX".
_OPTIONAL_WORDS = ("radeonrx", "radeon", "rtx", "rx", "geforce", "generation", "edition")

_table: dict[str, Any] = {}
_made: dict[int, Gpu] = {}
_places: dict[str, int] = {}
_short_places: dict[str, int] = {}


def load_gpus() -> list[Gpu]:
    """Every GPU of the catalog, in the file's order; each row is made into a record once."""
    return [_gpu_at(place) for place in range(len(_read()["gpus"]))]


def find_gpu(name: str) -> Gpu:
    """The GPU a name means: case, spaces, dashes, vendor words and 'GB' don't matter. InputError
    names the nearest."""
    place = _place_of(name)
    if place is None:
        refuse_several(name, "GPU")
        _refuse_other_meanings(name)
        raise InputError(
            f"GPU {shown(name)} is unknown{_nearest(name)}; name one of the catalog or give its"
            " memory with --vram"
        )
    return _gpu_at(place)


def _read() -> dict[str, Any]:
    if not _table:
        import os

        from napkinmath.base.json_text import loads

        with open(os.path.join(os.path.dirname(__file__), "gpus.json"), encoding="utf-8") as file:
            _table.update(loads(file.read()))
    return _table


def _gpu_at(place: int) -> Gpu:
    if place not in _made:
        table = _read()
        _made[place] = _gpu_of_row(table["gpus"][place], table["sources"])
    return _made[place]


def _place_of(name: str) -> int | None:
    """Where the catalog has a name: as it is written, else without the words people leave out."""
    if not _places:
        _index(_places, _key)
    place = _places.get(_key(name))
    if place is not None:
        return place
    short, places = _short_key(name), _all_places()
    return places.get(short, places.get(short.removesuffix("g")))


def _all_places() -> dict[str, int]:
    """Places by key and by short key; where two rows share one, the key counts, then the earlier."""
    if not _short_places:
        if not _places:
            _index(_places, _key)
        _short_places.update(_places)
        _index(_short_places, _short_key)
    return _short_places


def _index(places: dict[str, int], key: Callable[[str], str]) -> None:
    for place, row in enumerate(_read()["gpus"]):
        for name in (row["name"], *row["aliases"]):
            places.setdefault(key(name), place)


# Words of machines that people name and that run other kernels, and what is said of them.
_APPLE = ("apple", "mac", "macbook", "imac", "mps", "metal", "m1", "m2", "m3", "m4", "m5")
_OTHERS = (
    (_APPLE, "Apple's, whose Metal kernels are not priced"),
    (("cpu", "xeon", "epyc", "ryzen"), "no GPU, and steps on a CPU are not priced"),
    (("jetson", "orin", "xavier", "thor"), "a Jetson, whose system shares the memory"),
    (("tpu", "v5e", "v5p", "v6e", "trillium"), "Google's, whose steps are not priced"),
    (("arc", "gaudi", "gaudi2", "gaudi3", "hpu", "xpu"), "Intel's, whose kernels are not priced"),
    (("trainium", "trn1", "trn2", "inferentia"), "Amazon's, whose steps are not priced"),
    (("npu", "ascend", "910b"), "Huawei's, whose kernels are not priced"),
)


def _refuse_other_meanings(name: str) -> None:
    """Raises InputError for what another flag takes ('2x4090', '24gb'), and for machines that run
    neither CUDA nor ROCm, or share their memory."""
    words = set(name.lower().replace("-", " ").replace("_", " ").split())
    said = next((said for named, said in _OTHERS if words.intersection(named)), "")
    if said and not words & {"tesla", "nvidia", "amd"}:
        raise InputError(
            f"GPU {shown(name)} is {said}; --vram 24 (GiB) prices the memory of a CUDA GPU of that"
            " size"
        )
    count, _, kind = name.lower().partition("x")
    if count.strip().isdecimal() and _place_of(kind) is not None:
        raise InputError(
            f"GPU {shown(name)} is several GPUs; write --gpus {''.join(name.split())} (generate:"
            f" --gpu {kind.strip()} --tp {count.strip()})"
        )
    size = name.lower().replace(" ", "").removesuffix("ib").removesuffix("b")
    if size[-1:] in ("g", "m") and size[:-1].replace(".", "", 1).isdecimal():
        number = size[:-1] if size[-1] == "g" else f"{size[:-1]}MiB"
        raise InputError(f"GPU {shown(name)} is a size of memory; write --vram {number}")


def find_hardware(
    name: str | None = None,
    *,
    vram: str | int | None = None,
    display: tuple[int, int, int] = Display.NONE,
) -> Hardware:
    """The hardware of `--gpu NAME`, a MIG slice ("A100-80 MIG 3g.40gb") or bare memory (`vram`:
    '24', '24GiB' or bytes)."""
    given = (
        None
        if vram is None
        else vram
        if isinstance(vram, int)
        else parse_bytes(vram, what="--vram")
    )
    if name is None:
        if given is None:
            raise InputError("no GPU was named; give --gpu NAME or --vram SIZE")
        return Hardware(gpu=memory_only_gpu(given), memory_bytes=given, display=display)
    whole, profile = _split_mig(name)
    gpu = find_gpu(whole)
    if profile:
        gpu = _mig_slice(gpu, profile)
    return Hardware(
        gpu=gpu, memory_bytes=gpu.memory_bytes if given is None else given, display=display
    )


def memory_only_gpu(memory_bytes: int) -> Gpu:
    """A GPU of which only the memory is known: it has no rates, and the context of a mid-sized
    card."""
    return Gpu(
        name=f"{memory_bytes / GIB:g} GiB",
        vendor="unknown",
        architecture="unknown",
        compute_capability="",
        nominal_bytes=memory_bytes,
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=0.0,
        dense_flops=(),
        num_sms=100,
        boost_hz=0.0,
        l2_bytes=0,
        tdp_w=0.0,
        host_link=HostLink(kind="pcie", generation=4, lanes=16),
    )


def _gpu_of_row(row: dict[str, Any], sources: dict[str, str]) -> Gpu:
    nominal = int(row["nominal_gib"] * GIB)
    smi = row.get("smi_mib")
    cuda = row.get("cuda_mib") or smi
    link = row.get("gpu_link")
    return Gpu(
        name=row["name"],
        aliases=tuple(row["aliases"]),
        vendor=row["vendor"],
        architecture=row["architecture"],
        compute_capability=row["compute_capability"],
        nominal_bytes=nominal,
        memory_bytes=int(cuda * MIB) if cuda else nominal,
        nvidia_smi_bytes=int(smi * MIB) if smi else None,
        bandwidth_bytes_per_s=row["bandwidth_gb_per_s"] * 1e9,
        dense_flops=tuple((dtype, tflops * 1e12) for dtype, tflops in row["dense_tflops"].items()),
        num_sms=row["num_sms"],
        boost_hz=row["boost_mhz"] * 1e6,
        tensor_hz=row.get("tensor_mhz", row["boost_mhz"]) * 1e6,
        l2_bytes=int(row["l2_mib"] * MIB),
        tdp_w=row["tdp_w"],
        least_tdp_w=row.get("least_tdp_w", 0.0),
        host_link=HostLink(**row["host_link"]),
        gpu_link=GpuLink(**link) if link else None,
        unified_memory=row.get("unified_memory", False),
        launched=row.get("launched", ""),
        sources=tuple((field, sources[key]) for field, key in row["sources"].items()),
    )


def _key(name: str) -> str:
    """'NVIDIA A100-SXM4-80GB' -> 'a100sxm480': lower case, no vendor word, no punctuation, no 'gb'
    after a number, no (note)."""
    text = name.lower()
    while "(" in text and ")" in text[text.index("(") :]:
        start = text.index("(")
        text = text[:start] + " " + text[text.index(")", start) + 1 :]
    for word in _VENDOR_WORDS:
        text = text.replace(word, " ")
    plain = "".join(c for c in text if c.isalnum())
    for unit in ("gib", "gb"):
        plain = _without_unit(plain, unit)
    return plain


def _short_key(name: str) -> str:
    """The key without the words people leave out; empty where nothing else is left."""
    key = _key(name)
    for word in _OPTIONAL_WORDS:
        key = key.replace(word, "")
    return key


def _without_unit(text: str, unit: str) -> str:
    start = text.find(unit)
    while start > 0:
        if text[start - 1].isdecimal():
            text = text[:start] + text[start + len(unit) :]
            start = text.find(unit, start)
        else:
            start = text.find(unit, start + 1)
    return text


def _nearest(name: str) -> str:
    """'; did you mean ...?' with catalog names, compared by key so that punctuation does not
    count."""
    import difflib

    places, rows = _all_places(), _read()["gpus"]
    names: list[str] = []
    for key in difflib.get_close_matches(_key(name), list(places), n=6, cutoff=0.5):
        found = rows[places[key]]["name"]
        if found not in names:
            names.append(found)
    return f"; did you mean {', '.join(names[:3])}?" if names else ""


# MIG: (architecture, or the A30 by name) -> compute slices and memory slices of the device, from
# NVIDIA's MIG user guide, "supported MIG profiles". A profile is "<compute slices>g.<memory>gb".
_MIG_ARCHITECTURES = {"8.0", "9.0", "10.0", "10.3", "12.0"}


def _split_mig(name: str) -> tuple[str, str]:
    """'A100-80 MIG 3g.40gb' -> ('A100-80', '3g.40gb'); no profile gives ''."""
    words = name.replace("_", " ").lower().replace("mig", " ").split()
    if words and "g." in words[-1]:
        tail = words[-1]
        head, _, profile = tail.rpartition("-")
        return " ".join([*words[:-1], head]).strip(), profile
    return name, ""


def _mig_slice(gpu: Gpu, profile: str) -> Gpu:
    """The slice of a GPU a MIG profile names: its share of SMs by compute slices, of memory,
    bandwidth and L2 by memory slices."""
    compute_text, _, memory_text = profile.partition("g.")
    memory_number = memory_text.removesuffix("gb").removesuffix("+me")
    if (
        gpu.compute_capability not in _MIG_ARCHITECTURES
        or not compute_text.isdecimal()
        or not memory_number.isdecimal()
    ):
        raise InputError(
            f"MIG profile {shown(profile)} on {gpu.name} is not understood; write e.g. 'A100-80 MIG"
            " 3g.40gb'"
        )
    num_slices, compute_slices = (
        (4, 4) if gpu.name == "A30" or gpu.compute_capability == "12.0" else (8, 7)
    )
    compute = int(compute_text)
    memory_slices = max(1, round(int(memory_number) / (gpu.nominal_bytes / GIB) * num_slices))
    if not 1 <= compute <= compute_slices or memory_slices > num_slices:
        raise InputError(
            f"MIG profile {shown(profile)} does not exist on {gpu.name}; compute slices are 1 to"
            f" {compute_slices}"
        )
    # 14 of an A100's 108 SMs and 16 of an H100's 132 belong to a compute slice; SMs left over are
    # not used under MIG.
    per_slice = 16 if gpu.compute_capability == "9.0" else gpu.num_sms // compute_slices // 2 * 2
    sms = per_slice * compute
    compute_share, memory_share = sms / gpu.num_sms, memory_slices / num_slices
    total = gpu.nvidia_smi_bytes or gpu.memory_bytes
    # What the driver keeps of a slice, by the A100's published slices: 9,728 of 10,240 MiB, 19,968
    # of 20,480, 40,192 of 40,960.
    kept = total * (3 / 320 if memory_slices > 2 else 1 / 160)
    return gpu.replace(
        name=f"{gpu.name} MIG {compute}g.{memory_number}gb",
        nominal_bytes=int(memory_number) << 30,
        memory_bytes=int(total * memory_share - kept),
        nvidia_smi_bytes=None,
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s * memory_share,
        dense_flops=tuple((dtype, flops * compute_share) for dtype, flops in gpu.dense_flops),
        num_sms=sms,
        l2_bytes=int(gpu.l2_bytes * memory_share),
        gpu_link=None,
    )
