"""The linear that loading a 4-bit or 8-bit model leaves whole beside the head: the module of the
model's last named parameter.

transformers takes the name of that parameter, cuts its ending and skips the module so named.
transformers 5 cuts `.weight` alone, so that a classifier with a bias, whose last parameter is the
bias, is quantized; transformers 4 cuts both. A tied head is no parameter of its own: where no norm
with weights follows the layers (OLMo), the last layer's own last projection stays whole. Sources:
transformers 5.23 quantizers/base.py get_keys_to_not_convert; 4.40 integrations/bitsandbytes.py of
that name. Quantizers that walk the layers (GPTQ, AWQ, HQQ, ...) leave what lies outside them.
"""

from __future__ import annotations

from napkinmath.ir.ledger import Value, Weight
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.step import Run
from napkinmath.lowering.linears import QUANTIZED_KINDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.cache import Cached
    from napkinmath.ir.tape import Tape
    from napkinmath.lowering.policy import Policy


class PartLeftWhole(Part):
    """A part of which one linear is not quantized."""

    part: Part
    module: str

    @property
    def cached(self) -> tuple[Cached, ...]:
        return self.part.cached

    @property
    def longest_sequence(self) -> int:
        return self.part.longest_sequence

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        t.left_whole = self.module
        out = self.part.record(t, x, shared)
        t.left_whole = ""
        return out


def with_last_linear_whole(spec: ModelSpec, runs: list[Run], policy: Policy) -> ModelSpec | None:
    """The model with its last linear marked, given how it was recorded with all of them packed;
    None where nothing is to be marked."""
    if policy.format is None or policy.stack.model.library:
        return None
    run, last = _last_parameter(runs)
    if run is None or last is None:
        return None
    named, _, ending = last.path.rpartition(".")
    by_name = policy.format.of_bitsandbytes
    if (ending != "weight" and by_name and policy.stack.model.transformers >= (5, 0)) or (
        not by_name and run.stage.checkpointed
    ):
        return None
    packed = any(
        w.path == f"{named}.weight" and w.constants and w.kind in QUANTIZED_KINDS
        for w in run.block.weights
    )
    return _marked(spec, run.stage.path, _within(named, run.stage.path)) if packed else None


def _last_parameter(runs: list[Run]) -> tuple[Run | None, Weight | None]:
    """The last parameter of the model in the order of recording, which at the end of a model is
    that of its modules.

    OPT's project_out runs last and is registered before the layers, Gemma 3n's norm before what
    the head reads (transformers models/opt OPTDecoder.__init__, models/gemma3n
    Gemma3nTextModel.__init__).
    """
    for run in reversed(runs):
        early = run.stage.part.registered_early or None
        own = [
            w
            for w in run.block.weights
            if not (
                w.tied_to or w.buffer or w.kind == "adapter" or w.path.rpartition(".")[0] == early
            )
        ]
        if own:
            return run, own[-1]
    return None, None


def _within(path: str, stage: str) -> str:
    """A module's path from its layer on: 'mlp.down_proj' of 'model.layers.*.mlp.down_proj'."""
    layer, _, rest = path.removeprefix(stage).removeprefix(".").partition(".")
    return rest if layer == "*" or layer.isdecimal() else f"{layer}.{rest}".rstrip(".")


def _marked(spec: ModelSpec, path: str, module: str) -> ModelSpec:
    """The model with the last copy of the last stage at that path marked."""
    index = max(i for i, stage in enumerate(spec.stages) if stage.path == path)
    stage = spec.stages[index]
    apart: tuple[Stage, ...] = (
        (stage.replace(count=stage.count - 1, publishes=""),) if stage.count > 1 else ()
    )
    last = stage.replace(count=1, part=PartLeftWhole(part=stage.part, module=module))
    return spec.replace(stages=(*spec.stages[:index], *apart, last, *spec.stages[index + 1 :]))
