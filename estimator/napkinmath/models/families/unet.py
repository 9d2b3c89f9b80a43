"""UNets of Stable Diffusion 1, 2 and XL."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.canvas import Canvas
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.denoiser import Heads
from napkinmath.models.layers.unet import (
    Joined,
    Resized,
    Resnet,
    TokensIn,
    TokensOut,
    UNetEntrance,
    UNetHead,
    UNetLayer,
)

DOWN = {"CrossAttnDownBlock2D": True, "DownBlock2D": False}
UP = {"CrossAttnUpBlock2D": True, "UpBlock2D": False}
# diffusers 0.42 train_text_to_image_lora.py and train_text_to_image_lora_sdxl.py target_modules
TARGETS = ("to_k", "to_q", "to_v", "to_out.0")
TEXT_TOKENS = 77  # of CLIP's tokenizer, to which every prompt is padded


class _Plan:
    """The stages so far, and what the way up reads again."""

    def __init__(self, c: Config) -> None:
        self.stages: list[Stage] = []
        self.skips: list[tuple[str, int]] = []
        self.groups = c.size("norm_num_groups", 32)
        self.linear = c.flag("use_linear_projection", False)

    def add(self, part: Part, path: str = "", *, publishes: str = "", **more: object) -> str:
        """Adds a stage; returns the name that it publishes under."""
        self.stages.append(Stage(part=part, path=path, publishes=publishes, **more))
        return publishes

    def skip(self, part: Part, path: str, channels: int, *, closes: tuple[str, ...] = ()) -> str:
        """Adds a stage whose result the way up reads."""
        name = f"skip {len(self.skips)}"
        self.skips.append((name, channels))
        return self.add(part, path, publishes=name, closes=closes)

    def close(self, names: list[str]) -> None:
        """Shared values that nothing holds once the last stage has returned."""
        last = self.stages.pop()
        self.stages.append(last.replace(closes=(*last.closes, *names)))

    def resnet(
        self, path: str, channels: int, *, origin: str = "", name: str = "", again: bool = True
    ) -> str:
        part = Resnet(channels=channels, groups=self.groups, origin=origin)
        return self.add(part, path, publishes=name, checkpointed=again)

    def tokens(self, path: str, origin: str, heads: Heads, depth: int) -> Stage:
        """Adds transformer layers; returns the stage that ends them, which is not added yet."""
        self.add(TokensIn(origin=origin, groups=self.groups, by_linear=self.linear), path)
        self.add(
            UNetLayer(heads=heads), f"{path}.transformer_blocks", checkpointed=True, count=depth
        )
        part = TokensOut(origin=origin, by_linear=self.linear)
        return Stage(part=part, path=path, closes=(origin,))


def unet(c: Config) -> ModelSpec:
    """UNet2DConditionModel (diffusers models/unets/unet_2d_condition.py)."""
    widths = c.sizes("block_out_channels") or (320, 640, 1280, 1280)
    count = len(widths)
    layers = c.size("layers_per_block", 2)
    down, up = (_kinds(c, name, known) for name, known in _BLOCKS.items())
    depths = _each(c, "transformer_layers_per_block", 1, count)
    # which counts heads: diffusers kept the name by mistake (unet_2d_condition.py __init__)
    heads = _each(c, "attention_head_dim", 8, count)
    _refuse(c)
    plan = _Plan(c)
    text = c.size("cross_attention_dim", 1280)
    added = 0
    if c.text("addition_embed_type", "") == "text_time":
        added = c.size("projection_class_embeddings_input_dim")
    plan.skip(
        UNetEntrance(
            canvas=Canvas(
                side=8 * c.size("sample_size", 64),
                multiple=8 * 2 ** (count - 1),
                text=TEXT_TOKENS,
                targets=TARGETS,
            ),
            channels=c.size("in_channels", 4),
            text_width=text,
            width=widths[0],
            added=added,
        ),
        "",
        widths[0],
    )
    current = plan.skips[0][0]
    for i, width in enumerate(widths):
        path = f"down_blocks.{i}"
        own = Heads(heads=heads[i], size=width // heads[i])
        for j in range(layers):
            name = f"resnets.{j}"
            if not down[i]:
                skip = f"skip {len(plan.skips)}"
                plan.skips.append((skip, width))
                current = plan.resnet(f"{path}.{name}", width, origin=current, name=skip)
                continue
            made = plan.resnet(f"{path}.{name}", width, origin=current, name=f"{path} {j}")
            end = plan.tokens(f"{path}.attentions.{j}", made, own, depths[i])
            current = plan.skip(end.part, end.path, width, closes=end.closes)
        if i < count - 1:
            part = Resized(channels=width, origin=current)
            current = plan.skip(part, f"{path}.downsamplers.0", width)
    _middle(
        plan, current, widths[-1], Heads(heads=heads[-1], size=widths[-1] // heads[-1]), depths[-1]
    )
    for i in range(count):
        path, k = f"up_blocks.{i}", count - 1 - i
        width = widths[k]
        own = Heads(heads=heads[k], size=width // heads[k])
        held = [f"into {path}"]
        for j in range(layers + 1):
            skip, _ = plan.skips.pop()
            held.append(skip)
            entered = f"into {path}" if j == 0 else ""
            plan.add(Joined(origin=entered, skip=skip), f"{path}.join")
            name = f"{path} {j}" if up[i] else ""
            plan.resnet(f"{path}.resnets.{j}", width, name=name)
            if up[i]:
                end = plan.tokens(f"{path}.attentions.{j}", name, own, depths[k])
                plan.stages.append(end)
        if i < count - 1:
            part = Resized(channels=width, up=True)
            plan.add(part, f"{path}.upsamplers.0", publishes=f"into up_blocks.{i + 1}")
        plan.close(held)
    head = UNetHead(groups=plan.groups, channels=c.size("out_channels", 4))
    plan.add(head)
    symbols = {"h": widths[-1], "a": heads[-1], "dh": widths[-1] // heads[-1], "L": 0, "v": 1}
    return c.spec(tuple(plan.stages), symbols, family="unet")


_BLOCKS: dict[str, dict[str, bool]] = {"down_block_types": DOWN, "up_block_types": UP}


def _middle(plan: _Plan, origin: str, width: int, heads: Heads, depth: int) -> None:
    """A resnet that is not checkpointed, transformer layers, a resnet."""
    first = plan.resnet("mid_block.resnets.0", width, origin=origin, name="middle", again=False)
    end = plan.tokens("mid_block.attentions.0", first, heads, depth)
    plan.stages.append(end)
    plan.resnet("mid_block.resnets.1", width, name="into up_blocks.0")


def _kinds(c: Config, field: str, known: dict[str, bool]) -> tuple[bool, ...]:
    """Which blocks have transformer layers."""
    names = c.names(field)
    if not names:
        attended = [True, True, True, False]
        return tuple(attended if known is DOWN else reversed(attended))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(
            f"config field {field} has {shown(unknown[0])}; this family knows {' and '.join(known)}"
        )
    return tuple(known[name] for name in names)


def _each(c: Config, field: str, default: int, count: int) -> tuple[int, ...]:
    """A number of each block, given once or as a list."""
    if isinstance(c.values.get(field), (list, tuple)):
        found = c.sizes(field)
        c.same_length(field, len(found), count)
        return found
    return (c.size(field, default),) * count


def _refuse(c: Config) -> None:
    """Raises where a field asks for what has no rules."""
    plain: dict[str, tuple[object, ...]] = {
        "class_embed_type": (None,),
        "num_class_embeds": (None,),
        "addition_embed_type": (None, "text_time"),
        "encoder_hid_dim": (None,),
        "time_cond_proj_dim": (None,),
        "dual_cross_attention": (None, False),
        "only_cross_attention": (None, False),
        "resnet_time_scale_shift": (None, "default"),
        "resnet_skip_time_act": (None, False),
        "attention_type": (None, "default"),
        "mid_block_type": (None, "UNetMidBlock2DCrossAttn"),
        "num_attention_heads": (None,),
        "upcast_attention": (None, False),
        "conv_in_kernel": (None, 3),
        "conv_out_kernel": (None, 3),
        "act_fn": (None, "silu"),
        "time_embedding_act_fn": (None,),
        "cross_attention_norm": (None,),
        "reverse_transformer_layers_per_block": (None,),
        "dropout": (None, 0.0, 0),
    }
    for field, known in plain.items():
        value = c.values.get(field)
        if value not in known:
            raise InputError(f"config field {field}={shown(value)} has no rules")
