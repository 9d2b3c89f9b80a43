"""Evaluation and generation in the middle of training: real runs on a CPU beside the priced phases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("transformers")

import torch
from napkinmath.catalog.families import read_config
from napkinmath.estimate import Estimate, estimate
from napkinmath.inputs.options import train_config
from napkinmath.ledger import Phase
from napkinmath.timeline import Timeline
from napkinmath_profiler.trace import timeline_of, trace_module
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024)
SPEC = read_config({"model_type": "llama", **SIZES, "tie_word_embeddings": False})
BATCH, LENGTH = 4, 256
OPTIONS: dict[str, object] = {"bs": BATCH, "ctx": LENGTH, "precision": "fp32", "attention": "eager", "clip": False, "stack": "hf-bare"}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager", pad_token_id=1))


def observed(made: LlamaForCausalLM, optimizer: torch.optim.Optimizer, run: Callable[[], None]) -> Timeline:
    return timeline_of(trace_module(made, run, optimizer=optimizer, num_steps=2), origin="observed on cpu")


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
    """The priced cache is there whole from the start, the real one grows: a little more is priced, never less."""
    made = model().eval()
    ids = torch.randint(3, 1000, (BATCH, LENGTH))

    def run() -> None:
        with torch.no_grad():
            made.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, use_cache=True)  # fmt: skip

    real = observed(made, torch.optim.SGD(made.parameters(), lr=0.1), run).peak().nbytes
    e = priced(optimizer="sgd", generate=tokens)
    assert real <= e.phase_peaks[Phase.EVALUATE].nbytes <= 1.06 * real


def test_a_rollouts_prompts_go_through_together() -> None:
    """As many sequences as all micro-steps train on; the completion is not in the prompts' forward."""
    one, four = (priced(workload="grpo", grad_accum=n, completion=LENGTH // 2, reference=False) for n in (1, 4))
    cheap = priced(workload="grpo", grad_accum=4, completion=LENGTH - 1, reference=False)
    rollout = [e.phase_peaks[Phase.EVALUATE].nbytes - e.num_parameters * 4 * 3 for e in (one, four, cheap)]
    assert rollout[1] == pytest.approx(4 * rollout[0], rel=0.05) and rollout[2] < rollout[1] / 2
