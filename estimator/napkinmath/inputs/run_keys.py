"""How long a run is, as the trainers' files say it: steps, epochs, samples; and how many processes
prepare its samples."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.config.run_length import RunLength

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Keys whose step is one update of the optimizer, in whichever tool has them. What verl and NeMo-RL
# call a step is several updates, and is left out.
_STEPS = (
    "max_steps",
    "max_train_steps",
    "train_iters",
    "train.max_steps",
    "train.train_iters",
    "trainer.max_steps",
    "training.max_steps",
    "training.steps",
    "step_scheduler.max_steps",
    "tokens.train_steps",
)
_EPOCHS = (
    "num_train_epochs",
    "num_epochs",
    "train_epochs",
    "epochs",
    "train.epochs",
    "training.num_train_epochs",
    "step_scheduler.num_epochs",
)
_SAMPLES = ("train_samples",)
_WORKERS = (
    "dataloader_num_workers",
    "num_workers",
    "data.num_workers",
    "data.dataloader_num_workers",
    "training.dataloader_num_workers",
    "train_loader.num_workers",
)
_MOST = 1 << 40


def run_length(content: Mapping[str, object]) -> RunLength:
    """The length that a file's keys say; what is off (-1, null) or no number says nothing."""
    epochs = _number(content, _EPOCHS)
    run = RunLength(
        samples=int(_number(content, _SAMPLES)),
        epochs=epochs or 1.0,
        max_steps=int(_number(content, _STEPS)),
    )
    each = int(_number(content, ("max_steps_per_epoch",)))  # torchtune cuts its epochs
    return run.replace(max_steps=max(1, int(each * run.epochs))) if each else run


def loader_workers(content: Mapping[str, object]) -> int:
    """Processes of a GPU's data loader that a file's keys say; 0 where they say none."""
    return int(_number(content, _WORKERS))


def _number(content: Mapping[str, object], keys: tuple[str, ...]) -> float:
    """The first of the keys that has a number above 0; 0.0 where none has."""
    for key in keys:
        value = _at(content, key)
        try:
            found = float(value) if isinstance(value, (int, float, str)) else 0.0
        except ValueError:
            continue
        if not isinstance(value, bool) and 0 < found < _MOST:
            return found
    return 0.0


def _at(content: Mapping[str, object], path: str) -> object:
    """The value of 'train.max_steps', nested or with dots; words may have hyphens."""
    for name in (path, path.replace("_", "-")):
        if name in content:
            return content[name]
    section, _, rest = path.partition(".")
    inner = content.get(section) if rest else None
    return _at(values.mapping(inner, section), rest) if values.is_mapping(inner) else None
