"""What denoisers of every kind share: the picture that is trained on, embeddings of the time, and
attention over tokens as diffusers' processors run it.

Source: diffusers 0.42 models/embeddings.py, models/attention_processor.py AttnProcessor2_0,
models/attention.py FeedForward.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import Part
from napkinmath.ir.symbols import b
from napkinmath.ir.tape import Tape
from napkinmath.ops.attention import sdpa
from napkinmath.ops.elementwise import gelu, mul, scale, silu
from napkinmath.ops.images import squared_error
from napkinmath.ops.index import chunk, model_input
from napkinmath.ops.matmul import linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.ir.canvas import DrawnPictures
    from napkinmath.ir.recording import RecordingPolicy

# Parameters of what stands beside denoisers, counted on meta by transformers 5.23 (CLIPTextModel,
# CLIPTextModelWithProjection, T5EncoderModel of T5 1.1 XXL) and diffusers 0.42 (AutoencoderKL of 4
# and of 16 channels).
CLIP_L, CLIP_L_PROJECTED = 123_060_480, 123_650_304
CLIP_H, CLIP_BIG_G = 340_387_840, 694_659_840
T5_XXL = 4_762_310_656
# Tokens by width: openai/clip-vit-large-patch14, laion's CLIP-ViT-H-14 and -bigG-14, google/t5-v1_1-xxl.
CLIP_TOKENS = 49_408
T5_EMBEDDING = 32_128 * 4096
AUTOENCODER, AUTOENCODER_16 = 83_653_863, 83_819_683
TIME, TEXT, TARGET = "time embedding", "text embeddings", "target"


class DenoiserPart(Part):
    """A part of a model of diffusers, whose checkpointing is not reentrant: nothing is made to
    need a gradient for its sake."""

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return False

    def output_is_held(self, *, training: bool) -> bool:
        return False


class DenoiserEntrance(DenoiserPart):
    """What reads the noisy latents, the time and the text."""

    canvas: DrawnPictures
    channels: int
    text_width: int

    @property
    def draws(self) -> DrawnPictures | None:
        return self.canvas

    def size(self, t: Tape) -> tuple[int, int]:
        """(rows, columns) of the latents."""
        return self.canvas.latents(t.policy.config.batch)

    def read_text(self, t: Tape, shared: dict[str, Value]) -> Value:
        """The text's embeddings, as the encoders made them."""
        axes = (b, self.canvas.text, self.text_width)
        found = shared[TEXT] = model_input(t, TEXT, axes, t.policy.loaded_dtype)
        return found


def embedded(t: Tape, x: Value, name: str, width: Size) -> Value:
    """Two linears with SiLU between (TimestepEmbedding, PixArtAlphaTextProjection)."""
    with t.scope(name):
        hidden = silu(t, linear(t, x, "linear_1", width, bias=True))
        return linear(t, hidden, "linear_2", width, bias=True)


def sinusoids(t: Tape, name: str, width: Size) -> Value:
    """Sines and cosines of one number of each sample, in the model's type."""
    dtype = t.policy.loaded_dtype
    return model_input(t, name, (b, width), dtype)


class Heads(Record):
    """Attention of a module of diffusers, from one sequence to itself or to another one."""

    heads: int
    size: int
    bias: bool = False

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.size

    def record(self, t: Tape, x: Value, text: Value | None, output: int) -> Value:
        """Projections, SDPA, the output projection and its division by 1."""
        with t.scope() as frame:
            frame.local(x)
            source = x if text is None else text
            q = self.split(t, linear(t, x, "to_q", self.width, bias=self.bias))
            frame.local(q)
            k = linear(t, source, "to_k", self.width, bias=self.bias)
            frame.local(k)
            v = linear(t, source, "to_v", self.width, bias=self.bias)
            frame.local(v)
            attended = sdpa(t, q, self.split(t, k), self.split(t, v), groups=1, causal=False)
            joined = t.view(attended, (b, x.axes[1], self.width))
            return scale(t, linear(t, joined, "to_out.0", output, bias=True))

    def split(self, t: Tape, x: Value) -> Value:
        """By heads: axes (rows, heads, length, head size)."""
        whole = t.view(x, (b, x.axes[1], self.heads, self.size))
        return t.view(whole, (b, self.heads, x.axes[1], self.size))


def gated_gelu(t: Tape, x: Value, width: int, name: str = "ff") -> Value:
    """FeedForward with GEGLU: one linear of twice the width, half of it times GELU of the rest."""
    with t.scope(name), t.scope() as frame:
        frame.local(x)
        both = linear(t, x, "net.0.proj", 8 * width, bias=True)
        frame.local(both)
        half, gate = chunk(t, both, (4 * width, 4 * width))
        wide = mul(t, half, gelu(t, gate))
        frame.release(both)
        return linear(t, wide, "net.2", width, bias=True)


class Denoised(DenoiserPart):
    """The end of every denoiser: what it predicts against the target, mean squared error in
    fp32."""

    def loss(self, t: Tape, predicted: Value) -> Value:
        """The mean squared error."""
        target = model_input(t, TARGET, predicted.axes, t.policy.loaded_dtype)
        with t.scope() as frame:
            frame.local(predicted)
            return squared_error(t, predicted, target)
