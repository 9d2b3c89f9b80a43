"""The entrance of Stable Diffusion 3: patches of the latents by a convolution, positions cut out of a
table, the time's embedding with the pooled text.

Source: diffusers 0.42 models/transformers/transformer_sd3.py, models/embeddings.py PatchEmbed.
"""

from __future__ import annotations

from napkinmath.ir.ledger import Value
from napkinmath.ir.model_spec import SECOND_STREAM
from napkinmath.ir.symbols import b
from napkinmath.ir.tape import Tape
from napkinmath.models.layers.denoiser import TIME, DenoiserEntrance, embedded, sinusoids
from napkinmath.ops.convolution import patch_projection
from napkinmath.ops.elementwise import add, add_broadcast, cast, copy, promote
from napkinmath.ops.index import constant, model_input
from napkinmath.ops.matmul import linear


class Sd3Entrance(DenoiserEntrance):
    """Latents as patches with positions, and the streams' other inputs."""

    width: int
    patch: int
    places: int
    """Patches of a side that the table of positions has."""
    told: int
    """Width of the text's stream."""
    pooled: int

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        height, columns = self.size(t)
        rows, across = height // self.patch, columns // self.patch
        dtype = t.policy.loaded_dtype
        latents = model_input(t, "latents", (b, self.channels, height, columns), dtype)
        shared["latents"] = latents
        text = self.read_text(t, shared)
        table = t.weight(
            "pos_embed.pos_embed", (1, self.places**2, self.width), buffer=True, dtype=dtype
        )
        with t.scope() as frame:
            axes = (b, rows * across, self.width)
            with t.scope("pos_embed"):
                patches = patch_projection(
                    t, latents, "proj", axes, (self.patch, self.patch), self.channels, self.width
                )
                frame.local(patches)
                places = constant(t, "positions", (1, *axes[1:]), table.tensor.dtype)
                kept = patches.dtype
                wide = promote(kept, places.dtype)
                out = cast(t, add_broadcast(t, cast(t, patches, wide), places), kept)
            out = copy(t, out)
            frame.local(out)
            with t.scope("time_text_embed"):
                time = embedded(t, sinusoids(t, "time", 256), "timestep_embedder", self.width)
                pooled = sinusoids(t, "pooled text", self.pooled)
                shared[TIME] = add(t, time, embedded(t, pooled, "text_embedder", self.width))
            shared[SECOND_STREAM] = linear(t, text, "context_embedder", self.told, bias=True)
            return out
