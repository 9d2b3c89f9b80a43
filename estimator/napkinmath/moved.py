"""Module paths of 0.1 that moved into rooms: they import until END, each with a DeprecationWarning
that names the new path."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

END = "0.3.0"
# Old path -> new ones, without "napkinmath.": a folder's modules move with it; of several, each
# name is in the first that has it.
MOVED: dict[str, tuple[str, ...]] = {
    "accuracy": ("answers.ranges",),
    "allocator": ("memory.allocator", "memory.replay", "memory.allocator_settings"),
    "attainable": ("timing.attainable",),
    "batch": ("planning.batch",),
    "batch_lines": ("planning.batch_lines",),
    "calibrated_time": ("calibration.calibrated_time",),
    "catalog.arch_string": ("models.arch_string",),
    "catalog.config_file": ("models.config_file",),
    "catalog.families": ("models.families",),
    "catalog.layers": ("models.layers",),
    "cluster": ("config.cluster",),
    "collectives": ("timing.collectives",),
    "costs": ("ir.costs",),
    "dtypes": ("base.dtypes",),
    "efficiency": ("timing.efficiency", "timing.attention"),
    "errors": ("base.errors",),
    "expr": ("base.expr",),
    "flops": ("timing.flops",),
    "grid": ("planning.grid",),
    "guidelines": ("planning.guidelines",),
    "hardware": ("config.hardware",),
    "host_memory": ("answers.host_memory",),
    "inference": ("answers.inference",),
    "inputs.values": ("base.values",),
    "json_text": ("base.json_text",),
    "largest": ("planning.search",),
    "ledger": ("ir.ledger",),
    "lengths": ("config.lengths",),
    "local_machine": ("calibration.local_machine",),
    "measured_layers": ("calibration.measured_layers",),
    "mesh_bounds": ("planning.mesh_bounds",),
    "meshes": ("planning.meshes",),
    "model_spec": ("ir.model_spec",),
    "overlap": ("timing.overlap",),
    "paging": ("timing.paging",),
    "parallel_config": ("config.parallel_config",),
    "pipeline_time": ("timing.pipeline_time",),
    "plan": ("planning.plan", "planning.space", "planning.trades"),
    "plan_cluster": ("planning.plan_cluster",),
    "record": ("base.record",),
    "scaling": ("planning.scaling",),
    "schedule": ("timing.schedule",),
    "search": ("planning.search",),
    "simulate": ("memory.simulate",),
    "stages": ("memory.pipeline_ranks",),
    "step": ("ir.step", "lowering.build", "lowering.record", "lowering.micro_step"),
    "stragglers": ("timing.stragglers",),
    "sweep": ("planning.sweep",),
    "tape": ("ir.tape",),
    "throughput": ("answers.throughput",),
    "timeline": ("ir.timeline",),
    "train_config": ("config.train_config",),
    "units": ("base.units",),
    "varied_lengths": ("memory.varied_lengths", "timing.varied_time"),
    "workload_config": ("config.workload_config",),
}


# Names that left a module which stays, and the module that has them now.
NAMES: dict[str, dict[str, str]] = {
    "calibration": dict.fromkeys(
        ("Calibration", "cached_calibration", "load_calibration", "read_calibration", "staleness"),
        "calibration.calibration",
    ),
    "catalog.models": {"read_model": "models.read"},
    "estimate": dict.fromkeys(("Change", "Finding", "Fit", "Memory", "Range"), "answers.figures"),
}


def name_of(module: str, name: str) -> object:
    """A name of 0.1 that left a module; AttributeError for one that it never had."""
    home = NAMES.get(module.removeprefix("napkinmath."), {}).get(name)
    if home is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    from importlib import import_module
    from warnings import warn

    new = f"napkinmath.{home}"
    message = f"{module}.{name} moved to {new}; the old path ends with napkinmath {END}"
    warn(message, DeprecationWarning, stacklevel=4)
    return getattr(import_module(new), name)


def new_paths(name: str) -> tuple[str, ...]:
    """The modules that a module of 0.1 moved to; () for one that did not move."""
    old, found = name.removeprefix("napkinmath."), ()
    for start, targets in MOVED.items():
        if old == start or old.startswith(f"{start}."):
            found = tuple(f"napkinmath.{target}{old[len(start) :]}" for target in targets)
    return found


def spec_of(name: str) -> ModuleSpec | None:
    """How an old path is loaded; None for a path that did not move."""
    if not new_paths(name):
        return None
    from importlib.machinery import ModuleSpec

    loader = Forwarding()
    return ModuleSpec(name, loader, is_package=True)  # pyright: ignore[reportArgumentType]


class Forwarding:
    """Loads an old path as an empty module that looks its names up in the new ones."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """The ordinary module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Warns, and forwards every name."""
        import warnings
        from importlib import import_module

        homes = [import_module(path) for path in new_paths(module.__name__)]
        new = " and ".join(home.__name__ for home in homes)
        message = f"{module.__name__} moved to {new}; the old path ends with napkinmath {END}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)

        def forward(name: str) -> object:
            for home in homes:
                if hasattr(home, name):
                    return getattr(home, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}; see {new}")

        module.__dict__["__getattr__"] = forward
