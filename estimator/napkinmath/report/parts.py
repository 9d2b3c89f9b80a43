"""Which row of the component table a tensor belongs to, by its role and the path of its module."""

from __future__ import annotations

from napkinmath.ir.ledger import Role

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.timeline import TensorInfo

# Key -> label, in the order of the table.
LABELS: dict[str, str] = {
    "weights.layers": "weights of the layers",
    "weights.other": "embeddings, norms, head",
    "quantization": "quantization constants",
    "adapters": "adapter weights",
    "master": "master weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations.residual": "activations: residual",
    "activations.attention": "activations: attention",
    "activations.mlp": "activations: mlp",
    "activations.norm": "activations: norms",
    "activations.other": "activations: other",
    "activation_gradients": "activation gradients",
    "logits": "logits and loss",
    "workspace": "temporaries",
    "communication": "communication buffers",
    "engine": "inference engine",
    "unexplained": "unknown",
    "slack": "allocator slack",
    "managed": "paged optimizer states",
    "context": "device context",
}
_BY_ROLE: dict[Role, str] = {
    Role.QUANTIZATION: "quantization",
    Role.ADAPTERS: "adapters",
    Role.MASTER: "master",
    Role.GRADIENTS: "gradients",
    Role.OPTIMIZER: "optimizer",
    Role.ACTIVATION_GRADIENTS: "activation_gradients",
    Role.LOGITS: "logits",
    Role.WORKSPACE: "workspace",
    Role.COMMUNICATION: "communication",
    Role.ENGINE: "engine",
    Role.UNEXPLAINED: "unexplained",
    Role.SLACK: "slack",
    Role.CONTEXT: "context",
}
# Words in a module path that say what a layer's tensor is for; the innermost part that has one
# decides.
_PARTS = (
    ("norm", "norm"),
    ("ln_", "norm"),
    ("attn", "attention"),
    ("attention", "attention"),
    ("mixer", "attention"),
    ("rotary", "attention"),
    ("mlp", "mlp"),
    ("ffn", "mlp"),
    ("feed_forward", "mlp"),
    ("feedforward", "mlp"),
    ("expert", "mlp"),
    ("moe", "mlp"),
    ("intermediate", "mlp"),
    ("denserelu", "mlp"),
    ("densegated", "mlp"),
)
_LAYERS = frozenset(
    (
        *("layers", "layer", "h", "block", "blocks"),
        *("transformer_blocks", "single_transformer_blocks"),
        *("down_blocks", "mid_block", "up_blocks"),
    )
)  # what families call their list of layers
RESIDUAL_NAMES = ("hidden states", "hidden states between blocks")


def component_key(tensor: TensorInfo) -> str:
    """The row a tensor belongs to."""
    role = tensor.role
    if role is Role.WEIGHTS:
        return (
            "weights.layers"
            if in_layer(tensor.module) and not is_norm(tensor.module)
            else "weights.other"
        )
    if role is Role.ACTIVATIONS:
        return "activations." + _activation_part(tensor)
    return _BY_ROLE.get(role, "unexplained")


def in_layer(module: str) -> bool:
    """Whether a module is inside the list of layers."""
    return any(part in _LAYERS for part in module.split("."))


def is_norm(module: str) -> bool:
    """Whether a module is a normalisation, or inside one; the linear that modulates a denoiser's
    (norm1.linear) is none."""
    if "linear" in module.split("."):
        return False
    return any("norm" in part or part.startswith("ln_") for part in module.lower().split("."))


def _activation_part(tensor: TensorInfo) -> str:
    if tensor.name in RESIDUAL_NAMES:
        return "residual"
    for part in reversed(tensor.module.lower().split(".")):
        for word, meaning in _PARTS:
            if word in part:
                return meaning
    return "residual" if in_layer(tensor.module) else "other"
