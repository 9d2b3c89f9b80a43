"""Activation checkpointing: what a layer keeps, what it computes again, what it moves to the host,
and which layers do which."""

from .layers import (
    CheckpointHandle,
    OffloadCheckpoint,
    Recompute,
    checkpoint_layers,
    every,
    full,
    run_layer,
)
from .offload import HostStore
from .planner import CheckpointPlan, LayerOption, plan_layers
from .tiled import TiledMLP

__all__ = [
    "CheckpointHandle",
    "CheckpointPlan",
    "HostStore",
    "LayerOption",
    "OffloadCheckpoint",
    "Recompute",
    "TiledMLP",
    "checkpoint_layers",
    "every",
    "full",
    "plan_layers",
    "run_layer",
]
