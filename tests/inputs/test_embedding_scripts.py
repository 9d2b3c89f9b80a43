"""Scripts of sentence-transformers: the loss says the workload, a cached one the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import KeyUse
from napkinmath.config.train_config import TrainConfig
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

SCRIPT = """
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
from sentence_transformers.training_args import SentenceTransformerTrainingArguments
model = SentenceTransformer("microsoft/mpnet-base")
args = SentenceTransformerTrainingArguments("out", per_device_train_batch_size=BATCH, bf16=True)
inner = losses.LOSS
trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=d, loss=inner)
trainer.train()
"""


def read(folder: Path, loss: str, batch: int = 64) -> TrainConfig:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("BATCH", str(batch)).replace("LOSS", loss))
    (found,) = priced(with_job_file({"job": str(path), "ctx": 128}, []), [])
    assert str(found)  # the whole report, its replay too
    return found.config


@pytest.mark.parametrize(
    ("loss", "batch", "expected"),
    [
        ("MultipleNegativesRankingLoss(model)", 64, ("contrastive", 64, 1)),
        (
            "MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [768, 64])",
            16,
            ("contrastive", 16, 1),
        ),
        (
            "CachedMultipleNegativesRankingLoss(model, mini_batch_size=16)",
            1024,
            ("contrastive-cached", 16, 128),
        ),
        ("CachedMultipleNegativesRankingLoss(model)", 8, ("contrastive-cached", 8, 2)),
    ],
)
def test_the_loss_says_the_workload(
    tmp_path: Path, loss: str, batch: int, expected: tuple[str, int, int]
) -> None:
    config = read(tmp_path, loss, batch)
    kind, rows, steps = expected
    assert config.workload.kind.value == kind
    assert config.micro_batch_size == rows
    assert config.gradient_accumulation_steps == steps


@pytest.mark.parametrize(("gathers", "named"), [("True", ["gather_across_devices"]), ("False", [])])
def test_negatives_of_other_ranks_are_named(tmp_path: Path, gathers: str, named: list[str]) -> None:
    path = tmp_path / "train.py"
    loss = f"MultipleNegativesRankingLoss(model, gather_across_devices={gathers})"
    path.write_text(SCRIPT.replace("BATCH", "8").replace("LOSS", loss))
    (found,) = priced(with_job_file({"job": str(path), "ctx": 128}, []), [])
    assert [key.name for key in found.job_keys.of(KeyUse.NOT_PRICED)] == named


def test_a_loss_that_is_not_priced_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CosineSimilarityLoss of line 6"):
        read(tmp_path, "CosineSimilarityLoss(model)")
