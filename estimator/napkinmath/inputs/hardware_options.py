"""The machine that options name: GPUs, a MIG slice, bare memory, what else is on it, its measured
speeds and allocator settings."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.hardware import Display, Hardware

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.calibration.calibration import Calibration
    from napkinmath.config.cluster import Cluster, NetworkLink
    from napkinmath.config.hardware import Gpu, Hardware, Host

    Options = Mapping[str, object]


def machines(options: Options) -> list[Hardware | None]:
    """The hardware of each --gpu, or of --vram alone; [None] where none was named."""
    names = [values.text(name, "--gpu") for name in values.listed(options.get("gpu", ()))]
    names += _from_gpus(options, names)
    if not names and "vram" not in options and "calibration" in options:
        return [_calibrated_machine(values.text(options["calibration"], "--calibration"), options)]
    if not names and "vram" not in options:
        for key in ("mig", "display", "host", "power_limit"):
            if key in options:
                raise InputError(
                    f"--{key.replace('_', '-')} {shown(options[key])} says nothing without a GPU; add --gpu NAME"
                )
        return [None]
    if len(names) > 1 and ("vram" in options or "mig" in options):
        key = "vram" if "vram" in options else "mig"
        raise InputError(
            f"--{key} {shown(options[key])} with {len(names)} GPUs is ambiguous; give one --gpu"
        )
    return [_machine(name, options) for name in names or [None]]


def cluster_of(machine: Hardware | None, options: Options) -> Cluster | Hardware | None:
    """The cluster of --gpus and --nodes around one of its GPUs; the GPU itself where it is
    alone."""
    if not any(key in options for key in ("gpus", "nodes", "network", "host_ram")):
        return machine
    from napkinmath.inputs.parallel_options import gpus_and_nodes

    gpus, nodes = gpus_and_nodes(options)
    for key in ("network", "host_ram"):
        if key in options and (machine is None or (key == "network" and nodes == 1)):
            raise InputError(
                f"--{key.replace('_', '-')} {shown(options[key])} says nothing without"
                f" {'nodes; add --nodes N' if machine else 'GPUs; add --gpus NxTYPE'}"
            )
    if machine is None or (gpus == 1 and "host_ram" not in options):
        return machine
    from napkinmath.config.cluster import Cluster

    host_bytes = values.size(options["host_ram"], "--host-ram") if "host_ram" in options else 0
    return Cluster(
        hardware=machine,
        gpus_per_node=gpus // nodes,
        num_nodes=nodes,
        network=_network(options, gpus // nodes),
        host_bytes=host_bytes,
    )


def _network(options: Options, gpus_per_node: int) -> NetworkLink | None:
    """The link between nodes that --network names."""
    if "network" not in options:
        return None
    from napkinmath.catalog.links import network_named

    return network_named(str(options["network"]), gpus_per_node)


def _calibrated_machine(file: str, options: Options) -> Hardware:
    """The machine that a calibration file was measured on."""
    from napkinmath.calibration.calibration import device_gpu, load_calibration

    gpu = device_gpu(load_calibration(file))
    return Hardware(gpu=gpu, memory_bytes=gpu.memory_bytes, display=_display(options))


def allocator_text(options: Options) -> str:
    """The allocator settings as one string."""
    return values.text(options["allocator"], "--allocator") if "allocator" in options else ""


def calibration_on(
    machine: Hardware | None, options: Options, notes: list[str]
) -> Calibration | None:
    """The calibration named, or the one in the cache for this GPU unless it is stale; None leaves
    the datasheet's speeds."""
    if machine is None and "calibration" not in options:
        return None
    from napkinmath.calibration.calibration import (
        cached_calibration,
        load_calibration,
        read_calibration,
        staleness,
    )

    allow_stale = bool(options.get("allow_stale_calibration"))
    if "calibration" in options:
        file = values.text(options["calibration"], "--calibration")
        if machine is None:
            raise InputError(
                f"--calibration {shown(file)} says nothing without a GPU; add --gpu NAME"
            )
        if machine.gpu.power_limit_w:
            raise InputError(
                f"--calibration {shown(file)} was measured under its board's own limit, and"
                f" --power-limit {machine.gpu.power_limit_w:g} names another; drop one of the two"
            )
        return read_calibration(file, machine.gpu, allow_stale=allow_stale)
    if machine is not None and machine.gpu.power_limit_w:
        return None  # the datasheet's speeds, held to what is asked for
    cached = cached_calibration(machine.gpu) if machine is not None else None
    if cached is None or machine is None:
        return None
    reasons = staleness(load_calibration(cached), machine.gpu)
    if reasons and not allow_stale:
        notes.append(
            f"the calibration {cached} is stale and was not used: {'; '.join(reasons)}; run"
            " `estimate calibrate`, or add --allow-stale-calibration"
        )
        return None
    return read_calibration(cached, machine.gpu, allow_stale=True)


def _machine(name: str | None, options: Options) -> Hardware:
    if "mig" in options:
        profile = values.text(options["mig"], "--mig")
        if name is None:
            raise InputError(f"--mig {shown(profile)} is a slice of a GPU; add --gpu NAME")
        if "g." not in profile:
            raise InputError(f"--mig {shown(profile)} is not a profile; write e.g. 3g.40gb")
        name = f"{name} MIG {profile}"
    vram = values.size(options["vram"], "--vram") if "vram" in options else None
    found = find_hardware(name, vram=vram, display=_display(options))
    if "power_limit" in options:
        found = found.replace(gpu=_limited(found.gpu, options["power_limit"]))
    if "host" not in options:
        return found
    return found.replace(gpu=found.gpu.replace(given_host=_host(options, found.gpu.host)))


def _limited(gpu: Gpu, given: object) -> Gpu:
    """The GPU with its board held to so many watts, where it is known what they do to its clock."""
    from napkinmath.timing.attainable import clock_follows_power

    if not gpu.tdp_w or not clock_follows_power(gpu):
        raise InputError(
            f"--power-limit {shown(given)}: how the clock of {gpu.name} follows its watts is not"
            " known; leave it out"
        )
    low = _LEAST_POWER * gpu.tdp_w
    watts = values.number(given, f"--power-limit of {gpu.name}", low=low, high=gpu.tdp_w)
    return gpu.replace(power_limit_w=watts)


# The least limit that drivers take is 0.25 to 0.35 of the board's power (nvidia-smi -q -d POWER:
# A100 100 of 400 W, H100 200 of 700, RTX 3090 100 of 350, RTX 4090 150 of 450).
_LEAST_POWER = 0.25
_HOST = {"cores": "cores", "memory": "memory_bytes_per_s", "disk": "disk_read_bytes_per_s"}


def _host(options: Options, usual: Host) -> Host:
    """The usual machine with what --host says of it; a disk writes half as fast as it reads."""
    said = values.text(options["host"], "--host")
    given: dict[str, float] = {}
    for part in said.split(","):
        name, _, figure = (word.strip() for word in part.partition("="))
        plain = figure.lower().removesuffix("/s").removesuffix("gb").strip()
        try:
            if name == "cores":
                given[name] = int(plain)
            else:
                given[_HOST[name]] = 1e9 * values.number(float(plain), "", low=1e-3, high=1e6)
        except (KeyError, ValueError, InputError):
            raise InputError(
                f"--host {shown(part)} is not read; write e.g. cores=64,memory=400GB/s,disk=6GB/s"
            ) from None
    if "disk_read_bytes_per_s" in given:
        given["disk_write_bytes_per_s"] = given["disk_read_bytes_per_s"] / 2
    return usual.replace(**given)


def _display(options: Options) -> tuple[int, int, int]:
    kinds = {
        "none": Display.NONE,
        "linux": Display.LINUX_DESKTOP,
        "windows": Display.WDDM,
        "wddm": Display.WDDM,
    }
    name = values.text(options.get("display", "none"), "--display").lower()
    if name not in kinds:
        raise InputError(
            f"--display {shown(options['display'])} is unknown; use none, linux or"
            f" windows{suggest(name, list(kinds))}"
        )
    return kinds[name]


def _from_gpus(options: Options, names: list[str]) -> list[str]:
    """The type that --gpus N[xTYPE] names."""
    if "gpus" not in options:
        return []
    from napkinmath.inputs.parallel_options import number_and_type

    kind = number_and_type(options)[1]
    if kind and names:
        raise InputError(
            f"--gpus {shown(options['gpus'])} and --gpu {shown(names[0])} both name the GPU; give"
            " one of them"
        )
    return [kind] if kind else []
