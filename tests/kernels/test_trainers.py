"""Patched models in transformers' Trainer and TRL's SFTTrainer: the losses of an unpatched run,
step by step."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from napkinmath_kernels.errors import KernelInputError
from napkinmath_kernels.patching import patch, trl_head, unpatch
from napkinmath_kernels.patching.deferred_logits import DeferredLogits
from test_patch import make, quantize_to_4bit, with_adapters

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
STEPS = 4


@pytest.fixture(autouse=True)
def no_other_heads(monkeypatch):
    """Models that earlier tests patched may not be collected yet: TRL's modules are put back with
    the last head."""
    monkeypatch.setattr(trl_head, "_heads", {})


def examples():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, 96, (12,), generator=generator).tolist() for _ in range(16)]
    return [{"input_ids": ids, "labels": [-100] * 3 + ids[3:]} for ids in tokens]


def model_of(four_bit, patched):
    torch.manual_seed(0)
    model = with_adapters(quantize_to_4bit(make("llama"))) if four_bit else make("llama")
    if patched:
        patch(model, attention="napkinmath")
    return model


def settings(**more):
    return {
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        **more,
    }


def losses_of(trainer):
    trainer.train()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(found) == STEPS
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True, "label_smoothing_factor": 0.1},
    ],
)
@pytest.mark.parametrize("four_bit", [False, True])
def test_transformers_trainer(tmp_path, four_bit, more):
    curves = []
    for patched in (False, True):
        options = transformers.TrainingArguments(str(tmp_path), **settings(**more))
        collate = transformers.default_data_collator
        model = model_of(four_bit, patched)
        curves.append(
            losses_of(
                transformers.Trainer(
                    model, options, train_dataset=examples(), data_collator=collate
                )
            )
        )
    assert curves[1] == pytest.approx(curves[0], abs=1e-3) and len(set(curves[0])) > 1


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t0"
    )


@pytest.mark.parametrize("padding_free", [False, True])
def test_sft_trainer(tmp_path, padding_free):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizer = word_tokenizer()
    curves = []
    for patched in (False, True):
        options = trl.SFTConfig(
            str(tmp_path),
            **settings(gradient_checkpointing=False, bf16=False),
            max_length=None,
            padding_free=padding_free,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        dataset = datasets.Dataset.from_list(examples())
        model = model_of(False, patched)
        curves.append(
            losses_of(
                trl.SFTTrainer(
                    model, args=options, train_dataset=dataset, processing_class=tokenizer
                )
            )
        )
    assert curves[1] == pytest.approx(curves[0], abs=1e-3) and len(set(curves[0])) > 1


def pairs():
    for example in examples():
        words = [f"t{i}" for i in example["input_ids"]]
        chosen, rejected = " ".join(words[4:9]), " ".join(words[7:])
        yield {"prompt": " ".join(words[:4]) + " ", "chosen": chosen, "rejected": rejected}


def test_dpo_trainer(tmp_path, monkeypatch):
    """TRL's fused head takes the log-probabilities of policy and reference from ours, also where it
    is given to the model after the patch; other models' stay TRL's."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    scored = []
    ours = trl_head.linear_log_probabilities
    monkeypatch.setattr(
        trl_head,
        "linear_log_probabilities",
        lambda *given, **options: scored.append(torch.is_grad_enabled()) or ours(*given, **options),
    )
    curves = []
    for patched in (False, True):
        options = trl.DPOConfig(str(tmp_path), **settings(gradient_checkpointing=False, bf16=False))
        model = model_of(True, patched)
        trainer = trl.DPOTrainer(
            model,
            args=options,
            train_dataset=datasets.Dataset.from_list(list(pairs())),
            processing_class=word_tokenizer(),
        )
        curves.append(losses_of(trainer))
        assert len(scored) == (2 * STEPS if patched else 0)
    assert sum(scored) == STEPS  # the reference's without gradients
    assert curves[1] == pytest.approx(curves[0], abs=1e-3) and len(set(curves[0])) > 1
    assert isinstance(trl.trainer.utils._ChunkedLogProbFunction, trl_head.ChosenFunction)
    weight = model.get_output_embeddings().weight
    assert id(weight) in trl_head._heads
    unpatch(model)
    assert id(weight) not in trl_head._heads


def test_a_loss_on_entropies_is_refused():
    """TRL's entropies have a gradient; ours have none, and say so."""
    utils = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    model = model_of(False, True)
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.randint(3, 96, (2, 9))
    found = model(input_ids=ids, labels=ids, fused_lm_head=True)
    found.log_probs.sum().backward(retain_graph=True)
    with pytest.raises(KernelInputError, match="entropy_coef"):
        found.entropy.sum().backward()
    unpatch(model)


@pytest.fixture
def made_logits(monkeypatch):
    """How often a patched model's logits were made."""
    made = []
    own = DeferredLogits.materialize
    monkeypatch.setattr(DeferredLogits, "materialize", lambda x: made.append(x.shape) or own(x))
    return made


def test_a_trainer_in_bf16_does_not_make_the_logits(tmp_path, made_logits):
    """accelerate casts what an autocast forward returns to fp32, and asks for its type first."""
    curves = []
    for patched in (False, True):
        options = transformers.TrainingArguments(str(tmp_path), **settings(bf16=True))
        collate, model = transformers.default_data_collator, model_of(False, patched)
        trainer = transformers.Trainer(
            model, options, train_dataset=examples(), data_collator=collate
        )
        curves.append(losses_of(trainer))
    assert curves[1] == pytest.approx(curves[0], abs=2e-2) and not made_logits


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("loss", ["orpo", "simpo", "sigmoid"])
def test_preferences_without_a_reference(tmp_path, made_logits, loss, four_bit, bf16):
    """TRL's ORPO, and CPO with its losses: the same curve without logits, and TRL's own function
    again afterwards."""
    pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    import trl.experimental.gkd.gkd_trainer  # noqa: F401  loaded, its losses are installed too
    from trl.experimental import cpo, orpo

    made = {**settings(bf16=bf16, gradient_checkpointing=False), "max_length": None}
    curves = []
    for patched in (False, True):
        if loss == "orpo":
            options, kind = orpo.ORPOConfig(str(tmp_path), **made), orpo.ORPOTrainer
        else:
            alpha = 0.0 if loss == "simpo" else 1.0
            options = cpo.CPOConfig(str(tmp_path), **made, loss_type=loss, cpo_alpha=alpha)
            kind = cpo.CPOTrainer
        model = model_of(four_bit, patched)
        trainer = kind(
            model,
            args=options,
            train_dataset=datasets.Dataset.from_list(list(pairs())),
            processing_class=word_tokenizer(),
        )
        curves.append(losses_of(trainer))
    assert curves[1] == pytest.approx(curves[0], abs=2e-2 if bf16 else 1e-3) and not made_logits
    module = sys.modules[kind.__module__]
    assert isinstance(module.selective_log_softmax, trl_head.ChosenSelection)
    unpatch(model)
    assert module.selective_log_softmax is sys.modules[trl_head.MODULE].selective_log_softmax


def asked():
    for row in pairs():
        talk = [{"role": "user", "content": row["prompt"]}]
        yield {"messages": [*talk, {"role": "assistant", "content": row["chosen"]}]}


TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gkd_trainer(tmp_path, made_logits, beta, bf16):
    """A patched student learns from a patched teacher as unpatched ones do, without the logits of
    either, and TRL's own function is there again afterwards."""
    pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from trl.experimental import gkd

    tokenizer, curves = word_tokenizer(), []
    tokenizer.chat_template = TEMPLATE
    for patched in (False, True):
        options = gkd.GKDConfig(
            str(tmp_path),
            **{**settings(bf16=bf16, gradient_checkpointing=False), "remove_unused_columns": False},
            max_length=32,
            beta=beta,
            lmbda=0.0,
        )
        student, teacher = model_of(False, patched), model_of(False, False)
        with torch.no_grad():
            teacher.get_output_embeddings().weight.mul_(3)
        if patched:
            patch(teacher)
        trainer = gkd.GKDTrainer(
            student,
            teacher_model=teacher,
            args=options,
            train_dataset=datasets.Dataset.from_list(list(asked())),
            processing_class=tokenizer,
        )
        curves.append(losses_of(trainer))
    assert curves[1] == pytest.approx(curves[0], abs=2e-2 if bf16 else 1e-3) and not made_logits
    assert curves[0][0] > 1e-3
    for model in (student, teacher):
        unpatch(model)
    assert isinstance(gkd.GKDTrainer.__dict__["generalized_jsd_loss"], staticmethod)


def test_a_teacher_that_is_not_patched_is_said(made_logits):
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed")
    ids, (student, teacher) = torch.randint(3, 96, (2, 9)), (model_of(False, x) for x in (1, 0))
    logits = student(input_ids=ids).logits
    with torch.no_grad():
        taught = teacher.eval()(input_ids=ids).logits
    with pytest.warns(UserWarning, match="teacher is not patched"):
        gkd.GKDTrainer.generalized_jsd_loss(logits, taught)
    assert made_logits
    unpatch(student)


def test_the_distillation_trainers_loss(monkeypatch):
    """TRL's own chunks of another model; ours of a patched one, from its first forward on where the
    trainer is loaded after the patch."""
    pytest.importorskip("trl", reason="TRL is not installed")
    from napkinmath_kernels.patching import trl_divergence
    from trl.trainer import distillation_trainer as module

    calls = []
    ours = trl_divergence.linear_divergence
    count = lambda *given, **options: calls.append(1) or ours(*given, **options)  # noqa: E731
    monkeypatch.setattr(trl_divergence, "linear_divergence", count)
    kept = sys.modules.pop(trl_divergence.CHUNKED)
    student = model_of(False, True)
    sys.modules[trl_divergence.CHUNKED] = kept
    student.model(torch.randint(3, 96, (1, 4)))
    weight = student.get_output_embeddings().weight
    hidden, taught = torch.randn(2, 7, weight.shape[1]), torch.randn(2, 7, 24)
    head, mask = torch.randn(weight.shape[0], 24), torch.ones(2, 7)
    mask[0, 4:] = 0
    found = []
    for one in (weight, weight.detach().clone().requires_grad_()):
        given = (hidden.clone().requires_grad_(), taught, one, head, mask, 0.5)
        loss, entropy, count_valid = module._chunked_divergence_loss(
            *given, num_items_in_batch=5, temperature=0.8, student_final_logit_softcapping=4.0
        )
        loss.backward()
        found.append((loss, entropy, count_valid, given[0].grad, one.grad))
    assert len(calls) == 1
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, check_dtype=False)
    unpatch(student)
    assert not isinstance(module._chunked_divergence_loss, trl_divergence.ChosenChunks)
