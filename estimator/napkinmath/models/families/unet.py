"""UNets of Stable Diffusion 1, 2 and XL."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.ir.canvas import DrawnPictures
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.models.families.config import Config
from napkinmath.models.layers.denoiser import (
    AUTOENCODER,
    CLIP_BIG_G,
    CLIP_H,
    CLIP_L,
    CLIP_TOKENS,
    Heads,
)
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
# Width of the text's states -> the encoders that make them: Stable Diffusion 1, 2 and XL
_TOLD_BY = {768: CLIP_L, 1024: CLIP_H, 2048: CLIP_L + CLIP_BIG_G}
TEXT_TOKENS = 77  # of CLIP's tokenizer, to which every prompt is padded


class _Plan:
    """The stages so far, and what the way up reads again."""

    def __init__(self, c: Config) -> None:
        self.stages: list[Stage] = []
        self.skips: list[str] = []
        self.widths = c.sizes("block_out_channels") or (320, 640, 1280, 1280)
        self.layers = c.size("layers_per_block", 2)
        self.groups = c.size("norm_num_groups", 32)
        self.linear = c.flag("use_linear_projection", False)
        count = len(self.widths)
        self.depths = _each(c, "transformer_layers_per_block", 1, count)
        # which counts heads: diffusers kept the name by mistake (unet_2d_condition.py __init__)
        self.heads = _each(c, "attention_head_dim", 8, count)
        for width, heads in zip(self.widths, self.heads, strict=True):
            c.divides("block_out_channels", "norm_num_groups", width, self.groups)
            c.divides("block_out_channels", "attention_head_dim", width, max(heads, 1))

    def attention(self, block: int) -> Heads:
        """Attention of a block."""
        heads = max(self.heads[block], 1)
        return Heads(heads=heads, size=self.widths[block] // heads)

    def add(
        self,
        part: Part,
        path: str = "",
        *,
        publishes: str = "",
        closes: tuple[str, ...] = (),
        checkpointed: bool = False,
        count: int = 1,
    ) -> str:
        """Adds a stage; returns the name that it publishes under."""
        stage = Stage(part=part, path=path, publishes=publishes, closes=closes, count=count)
        self.stages.append(stage.replace(checkpointed=checkpointed))
        return publishes

    def skip(self) -> str:
        """The name of the next result that the way up reads."""
        self.skips.append(f"skip {len(self.skips)}")
        return self.skips[-1]

    def close(self, names: list[str]) -> None:
        """Shared values that nothing holds once the last stage has returned."""
        last = self.stages.pop()
        self.stages.append(last.replace(closes=(*last.closes, *names)))

    def resnet(
        self, path: str, channels: int, *, origin: str = "", name: str = "", again: bool = True
    ) -> str:
        """Adds a residual block; all but the middle's first are run `again`."""
        part = Resnet(channels=channels, groups=self.groups, origin=origin)
        return self.add(part, path, publishes=name, checkpointed=again)

    def tokens(self, path: str, block: int, origin: str, *, name: str = "") -> str:
        """Adds the transformer layers of a block behind what is at `origin`."""
        self.add(TokensIn(origin=origin, groups=self.groups, by_linear=self.linear), path)
        layer, inner = UNetLayer(heads=self.attention(block)), f"{path}.transformer_blocks"
        self.add(layer, inner, checkpointed=True, count=max(self.depths[block], 1))
        out = TokensOut(origin=origin, by_linear=self.linear)
        return self.add(out, path, publishes=name, closes=(origin,))


def unet(c: Config) -> ModelSpec:
    """UNet2DConditionModel (diffusers models/unets/unet_2d_condition.py)."""
    _refuse(c)
    plan = _Plan(c)
    widths, last = plan.widths, len(plan.widths) - 1
    down, up = (_kinds(c, name, known, last + 1) for name, known in _BLOCKS.items())
    added = 0
    if c.text("addition_embed_type", ""):
        added = c.size("projection_class_embeddings_input_dim")
    told = c.size("cross_attention_dim", 1280)
    entrance = UNetEntrance(
        canvas=DrawnPictures(
            side=8 * c.size("sample_size", 64),
            multiple=8 * 2**last,
            text=TEXT_TOKENS,
            targets=TARGETS,
            autoencoder=AUTOENCODER,
            text_encoders=_TOLD_BY.get(told, 0),
            text_embeddings=CLIP_TOKENS * told,
        ),
        channels=c.size("in_channels", 4),
        text_width=told,
        width=widths[0],
        added=added,
    )
    current = plan.add(entrance, publishes=plan.skip())
    for block in range(last + 1):
        current = _down(plan, block, current, attends=down[block])
    middle = plan.resnet(
        "mid_block.resnets.0", widths[-1], origin=current, name="middle", again=False
    )
    plan.tokens("mid_block.attentions.0", last, middle)
    plan.resnet("mid_block.resnets.1", widths[-1], name="into up_blocks.0")
    for number in range(last + 1):
        _up(plan, number, attends=up[number])
    plan.add(UNetHead(groups=plan.groups, channels=c.size("out_channels", 4)))
    layers = sum(s.count for s in plan.stages if isinstance(s.part, UNetLayer))
    return c.spec(tuple(plan.stages), {"h": widths[-1], "L": layers}, family="unet")


def _down(plan: _Plan, block: int, current: str, *, attends: bool) -> str:
    """Adds a block of the way down; returns what the next one reads."""
    path, width = f"down_blocks.{block}", plan.widths[block]
    for layer in range(plan.layers):
        resnet = f"{path}.resnets.{layer}"
        if attends:
            made = plan.resnet(resnet, width, origin=current, name=f"{path} {layer}")
            current = plan.tokens(f"{path}.attentions.{layer}", block, made, name=plan.skip())
        else:
            current = plan.resnet(resnet, width, origin=current, name=plan.skip())
    if block < len(plan.widths) - 1:
        half = Resized(channels=width, origin=current)
        current = plan.add(half, f"{path}.downsamplers.0", publishes=plan.skip())
    return current


def _up(plan: _Plan, number: int, *, attends: bool) -> None:
    """Adds a block of the way up, whose forward holds what it reads again until it returns."""
    path, block = f"up_blocks.{number}", len(plan.widths) - 1 - number
    width, held = plan.widths[block], [f"into {path}"]
    for layer in range(plan.layers + 1):
        held.append(plan.skips.pop())
        plan.add(Joined(origin="" if layer else held[0], skip=held[-1]), f"{path}.join")
        made = f"{path} {layer}" if attends else ""
        plan.resnet(f"{path}.resnets.{layer}", width, name=made)
        if attends:
            plan.tokens(f"{path}.attentions.{layer}", block, made)
    if block:
        twice = Resized(channels=width, up=True)
        plan.add(twice, f"{path}.upsamplers.0", publishes=f"into up_blocks.{number + 1}")
    if block:
        plan.close(held)
    else:  # the model's own forward names them to its end
        plan.close(held[:1])
        plan.stages[-1] = plan.stages[-1].replace(returned=tuple(held[1:]))


_PLAIN = ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")
_MIRROR = {"CrossAttnDownBlock2D": "CrossAttnUpBlock2D", "DownBlock2D": "UpBlock2D"}
_BLOCKS: dict[str, dict[str, bool]] = {"down_block_types": DOWN, "up_block_types": UP}


def _kinds(c: Config, field: str, known: dict[str, bool], count: int) -> tuple[bool, ...]:
    """Which blocks have transformer layers."""
    names = c.names(field)
    if not names:
        names = _PLAIN if known is DOWN else tuple(_MIRROR[name] for name in reversed(_PLAIN))
    c.same_length(field, len(names), count)
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
