"""ModelSpec: a model as a sequence of stages, each a part repeated some number of times."""

from __future__ import annotations

from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.expr import Size
    from napkinmath.config.workload_config import Head
    from napkinmath.ir.cache import Cached
    from napkinmath.ir.canvas import DrawnPictures
    from napkinmath.ir.ledger import Value
    from napkinmath.ir.pictures import Pictures
    from napkinmath.ir.recording import RecordingPolicy
    from napkinmath.ir.sounds import Sound
    from napkinmath.ir.tape import Tape

DECODER_TOKENS = "before the decoder's"
"""Virtual tokens of a prompt go before the embeddings, those of a prefix before keys and values."""
ENCODER_TOKENS = "before the encoder's"
"""Virtual tokens of a prompt go before the embeddings that the encoder alone reads."""


SECOND_STREAM = "second stream"
"""Name of the shared value that travels from block to block beside the hidden states: a part that
reads it takes it out, and puts what it hands on in its place."""


class Part(Record):
    """A piece of a model that can record its forward: an embedding, a kind of layer, head and loss.

    Parts are plain data made by a family's mapping from a config, equal where their numbers are
    equal.
    """

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        """Records the forward on the tape and returns the output that the next stage reads.

        `shared` holds what every stage can read (rotary tables, masks, encoder states); a part may
        publish into it.
        """
        raise NotImplementedError

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        """Whether the output of a part that reads the model's input is made to need a gradient, so
        that checkpoints have one."""
        return policy.inputs_require_grad

    @property
    def virtual_tokens(self) -> str:
        """Where virtual tokens go that the part can take: DECODER_TOKENS, ENCODER_TOKENS, or ''
        where it takes none."""
        return ""

    @property
    def cached(self) -> tuple[Cached, ...]:
        """What a layer keeps of each sequence while it generates."""
        return ()

    def output_is_held(self, *, training: bool) -> bool:
        """Whether the model's own forward, in training or eval mode, holds an entrance's output
        until it returns: it is the very tensor that the forward calls `inputs_embeds`."""
        return True

    @property
    def output_is_held_past_layers(self) -> bool:
        """Whether it is held where what follows is no unit of checkpointing."""
        return False

    def labelled(self, axes: tuple[Size, ...]) -> Part:
        """This entrance with labels of another shape; a part that reads none is what it was."""
        return self

    @property
    def registered_early(self) -> str:
        """The module that runs last of an exit's and is registered before others of the model."""
        return ""

    @property
    def task(self) -> str:
        """What a model that ends in this part is trained for, a key of models/tasks.py; '' for a
        part that is no exit."""
        return ""

    def hidden(self, t: Tape, x: Value) -> Value:
        """What the last linear of an exit reads: the hidden states, normed where a norm comes
        first."""
        return x

    def without_labels(self) -> Part:
        """This exit where the trainer computes the loss from its logits."""
        return self

    def unread_logits(self, t: Tape, hidden: Value) -> None:
        """Logits that a model makes beside its scores; of a language model's exit alone."""

    def ending_in(self, head: Head) -> Part | None:
        """This exit with another head in the place of head and loss; None where it is no causal
        language model's."""
        return None

    @property
    def returns_logits(self) -> bool:
        """Whether the model's forward is over before the loss, which the trainer computes."""
        return False

    @property
    def longest_sequence(self) -> int:
        """Tokens for which a table of learned positions has rows; 0 where nothing limits them."""
        return 0

    @property
    def needs_whole_sequence(self) -> bool:
        """Whether each token's keys are chosen among all of the sequence, so that no other rank can
        hold a part of it."""
        return False

    @property
    def is_unread(self) -> bool:
        """Whether it is a part of a tower whose input no batch brings: only its weights are
        priced."""
        return False

    @property
    def brings(self) -> str:
        """What every sample brings beside its tokens, as the report says it; '' for nothing."""
        return ""

    @property
    def hears(self) -> Sound | None:
        """The sound of every sample, for the part that reads it."""
        return None

    @property
    def draws(self) -> DrawnPictures | None:
        """The pictures that a denoiser is trained on, for the part that reads their latents."""
        return None

    @property
    def reads(self) -> Pictures | None:
        """What the processor makes of an image, for a part that takes its patches beside a text."""
        return None


class Stage(Record):
    """`count` copies of a part in a row, at `path` in the module tree."""

    part: Part
    count: int = 1
    path: str = ""
    symbols: tuple[tuple[str, Size], ...] = ()
    """Symbols bound otherwise than in the rest of the model (a vision tower's hidden size)."""
    checkpointed: bool = False
    """A unit of gradient checkpointing (a decoder layer)."""
    swapped: bool = False
    """Its linears wait on the host until others have run, in whose place they are copied."""
    ends_forward: bool = False
    """The model's own forward returns here, and another one of its forwards follows, or its
    caller."""
    publishes: str = ""
    """Name under which the last copy's output is shared instead of handed on (encoder states)."""
    returned: tuple[str, ...] = ()
    """Shared values that are among the model's outputs: held until the whole forward has
    returned."""
    waits: bool = False
    """Publishes only where the batch has images, whose features then take places in what waits for
    them; without, the output is handed on."""
    closes: tuple[str, ...] = ()
    """Shared values that nothing holds once this stage has returned (the encoder's position bias),
    unless a backward needs them."""
    modality: str = ""
    """'image': runs only where the batch has images; without, its weights lie idle. 'across': so
    does a layer of the text. 'idle': never runs for the loss."""


class ModelSpec(Record):
    """A model, read from a config by its family (catalog/families)."""

    name: str
    family: str
    stages: tuple[Stage, ...]
    symbols: tuple[tuple[str, int], ...]
    positions: int = 0
    """Tokens that its config says it was made for (max_position_embeddings); 0 where it says
    none."""
    source: str = ""
    stored_type: str = ""
    """The type in which from_pretrained of transformers 5 makes it: its checkpoint's. '' where that
    is not known."""
    refused_attention: tuple[str, ...] = ()
    """Words of `attn_implementation` at which transformers' class of it raises."""
    sdpa_since: tuple[int, int] = (0, 0)
    """The release of transformers before which its class has no SDPA."""

    @property
    def num_layers(self) -> int:
        """Checkpointable layers, over all towers."""
        return sum(stage.count for stage in self.stages if stage.checkpointed)

    @property
    def task(self) -> str:
        """What it is trained for, a key of models/tasks.py."""
        return self.stages[-1].part.task

    @property
    def returns_logits(self) -> bool:
        """Whether the model's forward is over before the loss, which the trainer computes."""
        return False

    @property
    def longest_sequence(self) -> int:
        """Tokens that the model has learned positions for: a longer sequence fails with an index
        error. 0 where nothing limits it."""
        limits = [limit for stage in self.stages if (limit := stage.part.longest_sequence)]
        return min(limits, default=0)

    @property
    def pictures(self) -> Pictures | None:
        """What becomes of an image of the batch; None for a model that reads none beside a text."""
        return next((found for stage in self.stages if (found := stage.part.reads)), None)

    @property
    def sound(self) -> Sound | None:
        """The sound of every sample; None for a model that reads none."""
        return next((found for stage in self.stages if (found := stage.part.hears)), None)

    @property
    def canvas(self) -> DrawnPictures | None:
        """The pictures that it is trained to make; None for a model that makes none."""
        return next((found for stage in self.stages if (found := stage.part.draws)), None)

    @property
    def has_idle_tower(self) -> bool:
        """Whether it reads images or sounds by a tower for which there are no rules."""
        return self.pictures is None and any(stage.part.is_unread for stage in self.stages)
