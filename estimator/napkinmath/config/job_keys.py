"""JobKeys: what became of every key of a trainer's job file."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.record import Record
from napkinmath.config.run_length import RunLength

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import TrainConfig


class KeyUse(str, Enum):
    """What a key of a job file does to the answer."""

    PRICED = "priced"
    NO_EFFECT = "no effect"
    """Known to change neither memory nor time of a training step, or given as what is off."""
    NOT_PRICED = "not priced"
    """Known to change memory or time, and left out of the figures."""
    UNKNOWN = "unknown"


class Difference(str, Enum):
    """How a run differs from the figures by what is not priced."""

    NONE = ""
    MORE = "more"
    LESS = "less"
    EITHER = "more or less"


class MoreBytes(Record):
    """Bytes that a run was seen to take at most beside what is priced."""

    fixed: int = 0
    a_token: float = 0.0
    """Of a micro-batch."""
    most: int = 0
    """Of all tokens together."""

    def of(self, tokens: int) -> int:
        """Bytes with so many tokens in a micro-batch."""
        return self.fixed + min(int(self.a_token * tokens), self.most)


class JobKey(Record):
    """One key, dotted where it is nested, with the reason for its use."""

    name: str
    use: KeyUse
    why: str = ""
    memory: Difference = Difference.NONE
    """Memory that a run takes beside what is said; of keys that are not priced."""
    time: Difference = Difference.NONE
    option: str = ""
    """What prices it where it is given beside the file: 'freeze', 'eval_bs'."""
    zero_stage: int = 0
    """Of ranks whose number is not said: what they share at most, by ZeRO's stages (1 optimizer
    states, 2 gradients too, 3 weights too); 0 where it may be anything."""
    of_activations: bool = False
    """Whether what it saves is of activations alone."""
    more: MoreBytes = MoreBytes()
    """Where memory has a bound: the range, the verdict and limits reach as far."""


class Origin(Record):
    """Where the value of an option was said."""

    option: str
    value: object
    file: str
    """'' for the command line."""
    key: str = ""
    """The file's own word for it; '' for what its tool takes where the file says nothing."""
    line: int = 0
    """From 1; 0 where no line says it."""

    @property
    def place(self) -> str:
        """'train.yaml:12 (bf16)'."""
        if not self.file:
            return "command line"
        line = f":{self.line}" if self.line else ""
        return f"{self.file}{line} ({self.key or 'not said there: what its tool takes'})"


class JobKeys(Record):
    """Every key of a job file of another tool, or of the several files that are one run."""

    tool: str
    path: str
    keys: tuple[JobKey, ...] = ()
    origins: tuple[Origin, ...] = ()
    """Where each option's value was said, as far as it was asked for."""
    assumed: frozenset[str] = frozenset()
    """Options that the file does not say."""
    run: RunLength = RunLength()
    """How long the run is, as far as the file says it."""
    workers: int = 0
    """Processes of a GPU's data loader, as far as the file says it."""
    engine: str = ""
    """The key by which the file, and no flag, asks for an inference engine beside the training."""
    differing: tuple[str, ...] = ()
    """What two files set differently, a sentence each."""
    by_unsloth: bool = False
    """Whether unsloth loads and prepares the model."""
    follows_gpu: bool = False
    """Whether what is not said of the 16-bit type is decided on the GPU: fp16 without bf16 units."""
    transformers: str = ""
    """The release of transformers that a script for unsloth pins, '4.56'."""

    def of(self, use: KeyUse) -> tuple[JobKey, ...]:
        """The keys of one use, in the order of the file."""
        return tuple(key for key in self.keys if key.use is use)

    @property
    def takes_more(self) -> bool:
        """Whether memory is asked for that is not priced."""
        return Difference.MORE in self.changes("memory")

    def more_bytes(self, config: TrainConfig) -> int:
        """What is not priced and has a bound takes at most, in a micro-batch of these sizes."""
        tokens = config.micro_batch_size * config.sequence_length
        sizes = tokens if isinstance(tokens, int) else 0
        return sum(key.more.of(sizes) for key in self.of(KeyUse.NOT_PRICED))

    @property
    def less(self) -> tuple[int, bool] | None:
        """What a run may hold less of at most: by ZeRO's stages (0 none of them), and whether of
        activations; None where it may be anything."""
        found = [
            key
            for key in self.of(KeyUse.NOT_PRICED)
            if key.memory in (Difference.LESS, Difference.EITHER)
        ]
        if not all(key.zero_stage or key.of_activations for key in found):
            return None
        stage = max((key.zero_stage for key in found), default=0)
        return stage, any(key.of_activations for key in found)

    def changes(self, what: str) -> frozenset[Difference]:
        """How memory or time ('memory', 'time') differ by what is not priced."""
        found = {getattr(key, what) for key in self.of(KeyUse.NOT_PRICED)} - {Difference.NONE}
        return (
            frozenset({Difference.MORE, Difference.LESS})
            if Difference.EITHER in found
            else frozenset(found)
        )
