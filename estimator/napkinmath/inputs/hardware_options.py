"""The machine that options name: GPUs, a MIG slice, bare memory, what else is on it, its measured speeds and allocator settings."""

from __future__ import annotations

from napkinmath.errors import InputError, shown, suggest
from napkinmath.inputs import values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.efficiency import Efficiency
    from napkinmath.hardware import Hardware

    Options = Mapping[str, object]


def machines(options: Options) -> list[Hardware | None]:
    """The hardware of each --gpu, or of --vram alone; [None] where none was named."""
    names = [values.text(name, "--gpu") for name in values.listed(options.get("gpu", ()))]
    names += _from_gpus(options, names)
    _refuse_nodes(options)
    if not names and "vram" not in options:
        for key in ("mig", "display"):
            if key in options:
                raise InputError(f"--{key} {shown(options[key])} says nothing without a GPU; add --gpu NAME")
        return [None]
    if len(names) > 1 and ("vram" in options or "mig" in options):
        key = "vram" if "vram" in options else "mig"
        raise InputError(f"--{key} {shown(options[key])} with {len(names)} GPUs is ambiguous; give one --gpu")
    return [_machine(name, options) for name in (names or [None])]


def allocator_text(options: Options) -> str:
    """The allocator settings as one string."""
    return values.text(options["allocator"], "--allocator") if "allocator" in options else ""


def speed_on(machine: Hardware | None, options: Options, notes: list[str]) -> Efficiency | None:
    """Speeds of the calibration named, or of the one in the cache for this GPU; None leaves the datasheet's."""
    from napkinmath.calibration import cached_calibration, read_calibration

    if "calibration" in options:
        file = values.text(options["calibration"], "--calibration")
        if machine is None:
            raise InputError(f"--calibration {shown(file)} says nothing without a GPU; add --gpu NAME")
        return read_calibration(file, machine.gpu)
    cached = cached_calibration(machine.gpu) if machine is not None else None
    if cached is None or machine is None:
        return None
    notes.append(f"speeds of {machine.gpu.name} from the calibration {cached}")
    return read_calibration(cached, machine.gpu)


def _machine(name: str | None, options: Options) -> Hardware:
    from napkinmath.catalog.gpus import find_hardware

    if "mig" in options:
        profile = values.text(options["mig"], "--mig")
        if name is None:
            raise InputError(f"--mig {shown(profile)} is a slice of a GPU; add --gpu NAME")
        if "g." not in profile:
            raise InputError(f"--mig {shown(profile)} is not a profile; write e.g. 3g.40gb")
        name = f"{name} MIG {profile}"
    vram = values.size(options["vram"], "--vram") if "vram" in options else None
    return find_hardware(name, vram=vram, display=_display(options))


def _display(options: Options) -> tuple[int, int, int]:
    from napkinmath.hardware import Display

    kinds = {"none": Display.NONE, "linux": Display.LINUX_DESKTOP, "windows": Display.WDDM, "wddm": Display.WDDM}
    name = values.text(options.get("display", "none"), "--display").lower()
    if name not in kinds:
        raise InputError(f"--display {shown(options['display'])} is unknown; use none, linux or windows{suggest(name, list(kinds))}")
    return kinds[name]


def _from_gpus(options: Options, names: list[str]) -> list[str]:
    """--gpus N[xTYPE]: the type where it names one; more than one GPU is another command's."""
    if "gpus" not in options:
        return []
    given = str(options["gpus"])
    number, _, kind = given.lower().partition("x")
    count = values.count(number or given, "--gpus", high=1 << 20)
    if count > 1:
        raise InputError(f"--gpus {shown(given)}: this command prices one GPU; leave --gpus out, or see `estimate plan`")
    kind = given[len(number) + 1 :].strip()
    if kind and names:
        raise InputError(f"--gpus {shown(given)} and --gpu {shown(names[0])} both name the GPU; give one of them")
    return [kind] if kind else []


def _refuse_nodes(options: Options) -> None:
    if "nodes" in options and values.count(options["nodes"], "--nodes", high=1 << 20) > 1:
        raise InputError(f"--nodes {shown(options['nodes'])}: this command prices one GPU; leave --nodes out, or see `estimate plan`")
