"""napkinmath: what one training step of a language model costs in memory and time, what it is made
of, and where it fits.

    import napkinmath
    step = napkinmath.estimate("llama-7b", adapter=napkinmath.AdapterConfig(rank=16), micro_batch_size=4, hardware="A100-80")
    print(step.memory.allocated.value, step.verdict)

Names are loaded when first used; nothing here imports torch, numpy or rich.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from napkinmath.base.errors import InputError as InputError
    from napkinmath.catalog.gpus import find_hardware as find_hardware
    from napkinmath.config.cluster import Cluster as Cluster
    from napkinmath.config.hardware import Hardware as Hardware
    from napkinmath.config.parallel_config import DataParallel as DataParallel
    from napkinmath.config.parallel_config import ParallelConfig as ParallelConfig
    from napkinmath.config.parallel_config import Sharding as Sharding
    from napkinmath.config.train_config import AdapterConfig as AdapterConfig
    from napkinmath.config.train_config import AdapterKind as AdapterKind
    from napkinmath.config.train_config import Attention as Attention
    from napkinmath.config.train_config import Batch as Batch
    from napkinmath.config.train_config import Kernels as Kernels
    from napkinmath.config.train_config import Loss as Loss
    from napkinmath.config.train_config import OffloadConfig as OffloadConfig
    from napkinmath.config.train_config import Precision as Precision
    from napkinmath.config.train_config import QuantizationConfig as QuantizationConfig
    from napkinmath.config.train_config import RecomputeConfig as RecomputeConfig
    from napkinmath.config.train_config import RecomputeKind as RecomputeKind
    from napkinmath.config.train_config import TrainConfig as TrainConfig
    from napkinmath.config.zero_config import ZeroConfig as ZeroConfig
    from napkinmath.estimate import Estimate as Estimate
    from napkinmath.estimate import Verdict as Verdict
    from napkinmath.estimate import estimate as estimate
    from napkinmath.ir.model_spec import ModelSpec as ModelSpec
    from napkinmath.ir.timeline import Timeline as Timeline
    from napkinmath.models.read import read_model as read_model

__version__ = "0.2.0"
__all__ = [
    "AdapterConfig",
    "AdapterKind",
    "Attention",
    "Batch",
    "Cluster",
    "DataParallel",
    "Estimate",
    "Hardware",
    "InputError",
    "Kernels",
    "Loss",
    "ModelSpec",
    "OffloadConfig",
    "ParallelConfig",
    "Precision",
    "QuantizationConfig",
    "RecomputeConfig",
    "RecomputeKind",
    "Sharding",
    "Timeline",
    "TrainConfig",
    "Verdict",
    "ZeroConfig",
    "__version__",
    "estimate",
    "find_hardware",
    "read_model",
]
_HOMES = {
    "catalog.gpus": ("find_hardware",),
    "models.read": ("read_model",),
    "config.cluster": ("Cluster",),
    "base.errors": ("InputError",),
    "estimate": ("Estimate", "Verdict", "estimate"),
    "config.hardware": ("Hardware",),
    "ir.model_spec": ("ModelSpec",),
    "config.parallel_config": ("DataParallel", "ParallelConfig", "Sharding"),
    "config.zero_config": ("ZeroConfig",),
    "ir.timeline": ("Timeline",),
    "config.train_config": (
        "AdapterConfig",
        "AdapterKind",
        "Attention",
        "Batch",
        "Kernels",
        "Loss",
        "OffloadConfig",
        "Precision",
        "QuantizationConfig",
        "RecomputeConfig",
        "RecomputeKind",
        "TrainConfig",
    ),
}


# What the packages with torch give, under the name that a training script would try first.
_WITH_TORCH = {
    "preflight": "napkinmath_profiler.preflight",
    "PreflightCallback": "napkinmath_profiler.preflight.trainer_callback",
    "trace": "napkinmath_profiler.trace",
    "watch": "napkinmath_profiler.watch",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(__import__(f"napkinmath.{module}", fromlist=[name]), name)
    if name in _WITH_TORCH:
        return _with_torch(name)
    raise AttributeError(f"module 'napkinmath' has no attribute {name!r}")


def _with_torch(name: str) -> Any:
    """A function of the profiler. Raises ImportError that says what to install."""
    try:
        return getattr(__import__(_WITH_TORCH[name], fromlist=[name]), name)
    except ModuleNotFoundError as error:
        from napkinmath.base.installing import pip_install

        raise ImportError(
            f"napkinmath.{name} needs {error.name}; install it with: {pip_install('profiler')}"
        ) from error


def moved_name(module: str, name: str) -> object:
    """A name of 0.1 that left a module which stays; what such a module's `__getattr__` asks."""
    if name == "__path__":  # what `from module import ...` asks of every module
        raise AttributeError(f"module {module!r} is no package")
    from napkinmath.moved import name_of

    return name_of(module, name)


def views() -> object:
    """How an Estimate shows itself: asked by a module that stands below the report."""
    from napkinmath.report import views

    return views


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:
    import sys

    class _Package(type(sys)):
        """The package, whose `estimate` is the function also after the import system binds the
        submodule of that name."""

        @property
        def estimate(self):
            return __getattr__("estimate")

        @estimate.setter
        def estimate(self, submodule):
            pass

    sys.modules[__name__].__class__ = _Package

    class _Moved:
        """Asks for the paths of 0.1 after every other finder gave up, so that it costs nothing."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if not name.startswith("napkinmath."):
                return None
            from napkinmath.moved import spec_of

            return spec_of(name)

    sys.meta_path.append(_Moved)
