"""Evaluation, generation and a teacher's divergence: real runs on a CPU beside the priced
phases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("transformers")

import peft
import torch
from accelerate.utils import convert_outputs_to_fp32
from napkinmath.estimate import Estimate, estimate
from napkinmath.inputs.options import train_config
from napkinmath.ir.ledger import Phase, Role
from napkinmath.ir.timeline import Timeline
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import timeline_of, trace_module
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1024,
)
SPEC = read_config({"model_type": "llama", **SIZES, "tie_word_embeddings": False})
BATCH, LENGTH = 4, 256
OPTIONS: dict[str, object] = {
    "bs": BATCH,
    "ctx": LENGTH,
    "precision": "fp32",
    "attention": "eager",
    "clip": False,
    "stack": "hf-bare",
}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager", pad_token_id=1))


def observed(
    made: LlamaForCausalLM, optimizer: torch.optim.Optimizer, run: Callable[[], None]
) -> Timeline:
    return timeline_of(
        trace_module(made, run, optimizer=optimizer, num_steps=2), origin="observed on cpu"
    )


def priced(**more: object) -> Estimate:
    return estimate(SPEC, train_config({**OPTIONS, **more}))


def test_an_evaluation_between_steps_is_the_peak_that_was_priced() -> None:
    made = model()
    made.config.use_cache = False
    optimizer = torch.optim.AdamW(made.parameters(), foreach=False)

    def run() -> None:
        ids = torch.randint(3, 1000, (BATCH, LENGTH))
        made.train()
        loss = made(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss, ids
        made.eval()
        with torch.no_grad():
            many = torch.randint(3, 1000, (8 * BATCH, LENGTH))
            made(input_ids=many, labels=many)

    e = priced(optimizer="adamw", eval_bs=8 * BATCH)
    assert next(iter(e.phase_peaks)) is Phase.EVALUATE
    assert observed(made, optimizer, run).peak().nbytes == pytest.approx(e.peak.nbytes, rel=3e-3)


@pytest.mark.parametrize("tokens", [2, 64])
def test_generation_holds_its_prompts_forward_and_the_cache(tokens: int) -> None:
    """The priced cache is there whole from the start, the real one grows: a little more is priced,
    never less."""
    made = model().eval()
    ids = torch.randint(3, 1000, (BATCH, LENGTH))

    def run() -> None:
        with torch.no_grad():
            made.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
            )

    real = observed(made, torch.optim.SGD(made.parameters(), lr=0.1), run).peak().nbytes
    e = priced(optimizer="sgd", generate=tokens)
    assert real <= e.phase_peaks[Phase.EVALUATE].nbytes <= 1.06 * real


@pytest.mark.parametrize("method", ["lora", "prompt", "prefix"])
def test_an_evaluation_of_adapters_is_the_peak_that_was_priced(method: str) -> None:
    adapters: dict[str, peft.PeftConfig] = {
        "lora": peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
    }
    made = peft.get_peft_model(model(), adapters[method])
    made.config.use_cache = method == "prefix"
    optimizer = torch.optim.AdamW(made.parameters(), foreach=False)

    def run() -> None:
        ids = torch.randint(3, 1000, (BATCH, LENGTH))
        made.train()
        loss = made(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss, ids
        made.eval()
        with torch.no_grad():
            many = torch.randint(3, 1000, (8 * BATCH, LENGTH))
            made(input_ids=many, labels=many)

    options = {"targets": "q_proj,v_proj", "rank": 8} if method == "lora" else {"virtual_tokens": 8}
    e = priced(optimizer="adamw", eval_bs=8 * BATCH, method=method, **options)
    assert next(iter(e.phase_peaks)) is Phase.EVALUATE
    assert observed(made, optimizer, run).peak().nbytes == pytest.approx(e.peak.nbytes, rel=4e-3)


def test_a_rollouts_prompts_go_through_together() -> None:
    """As many sequences as all micro-steps train on; the completion is not in the prompts'
    forward."""
    one, four = (
        priced(workload="grpo", grad_accum=n, completion=LENGTH // 2, reference=False)
        for n in (1, 4)
    )
    cheap = priced(workload="grpo", grad_accum=4, completion=LENGTH - 1, reference=False)
    rollout = [
        e.phase_peaks[Phase.ROLLOUT].nbytes - e.num_parameters * 4 * 3 for e in (one, four, cheap)
    ]
    assert rollout[1] == pytest.approx(4 * rollout[0], rel=0.05) and rollout[2] < rollout[1] / 2


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_distillation_holds_what_trls_loss_does(precision: str) -> None:
    """Ten tensors of b·s·v while the divergence is computed, six in the backward, whatever the
    models are."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    wide = {
        **SIZES,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 50257,
    }
    batch, length = 2, 128
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    student, teacher = (
        LlamaForCausalLM(LlamaConfig(**wide, attn_implementation="eager", pad_token_id=1)).to(dtype)
        for _ in range(2)
    )
    for each in (student, teacher):
        each.config.use_cache = False
        if precision != "fp32":  # as accelerate prepares both
            each.forward = convert_outputs_to_fp32(
                torch.autocast("cpu", torch.bfloat16)(each.forward)
            )
    optimizer = torch.optim.AdamW(student.parameters(), foreach=False)

    def compute_loss(ids: torch.Tensor) -> torch.Tensor:
        made = student(input_ids=ids)
        with torch.no_grad():
            taught = teacher(input_ids=ids)
        return gkd.GKDTrainer.generalized_jsd_loss(
            made.logits[:, :-1], taught.logits[:, :-1], labels=ids[:, 1:], beta=1.0
        )

    def run() -> None:
        compute_loss(torch.randint(3, 50000, (batch, length))).backward()
        optimizer.step()
        optimizer.zero_grad()

    student.train()
    real = observed(student, optimizer, run)
    spec = read_config({"model_type": "llama", **wide, "tie_word_embeddings": False})
    e = estimate(
        spec,
        train_config(
            {
                **OPTIONS,
                "bs": batch,
                "ctx": length,
                "precision": precision,
                "optimizer": "adamw",
                "workload": "distill",
                "teacher": "gpt2",
            }
        ),
    )
    peaks = real.phase_peaks()
    loss = max(
        (peaks[phase] for phase in (Phase.FORWARD, Phase.LOSS) if phase in peaks),
        key=lambda peak: peak.nbytes,
    )
    for found, phase in ((loss, Phase.FORWARD), (peaks[Phase.BACKWARD], Phase.BACKWARD)):
        here = e.timeline.breakdown(e.phase_peaks[phase])[Role.LOGITS]
        assert real.breakdown(found)[Role.LOGITS] == pytest.approx(here, rel=0.03), phase
