"""Workloads: each phase has the bytes that arithmetic gives, nothing leaks, evaluation costs no
step time, sweeps agree."""

from __future__ import annotations

import pytest
from cli.runs import run
from napkinmath.answers.assumptions import assumptions
from napkinmath.answers.inference import kv_cache_bytes
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.train_config import Loss
from napkinmath.estimate import Estimate, estimate
from napkinmath.inputs.options import train_config
from napkinmath.ir.ledger import ALLOC, Phase, Role
from napkinmath.models.families import read_config
from napkinmath.models.read import read_model
from napkinmath.planning.grid import Grid
from napkinmath.planning.plan import plan
from napkinmath.planning.search import largest_batch
from napkinmath.planning.space import Goal, Machine, open_space
from napkinmath.planning.sweep import sweep
from napkinmath.report.moments import moment

SPEC = read_config(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "vocab_size": 5000,
        "num_hidden_layers": 3,
    }
)
BASE: dict[str, object] = {"bs": 2, "ctx": 512}
KINDS: dict[str, dict[str, object]] = {
    "dpo": {"workload": "dpo"},
    "dpo precomputed": {"workload": "dpo", "reference": False},
    "reward": {"workload": "reward"},
    "distill": {"workload": "distill", "teacher": "gpt2"},
    "grpo": {"workload": "grpo", "completion": 128},
    "grpo scored": {"workload": "grpo", "teacher": "gpt2"},
    "ppo": {"workload": "ppo", "grad_accum": 3},
    "evaluation": {"eval_bs": 16},
    "generation": {"generate": 300},
}


def priced(**options: object) -> Estimate:
    return estimate(SPEC, train_config({**BASE, **options}), hardware="a100-80")


def in_use_at_end(e: Estimate) -> int:
    """Bytes that live when the last step is over."""
    sizes = [t.requested for t in e.timeline.tensors]
    live = 0
    for segment in e.timeline.segments:
        net = sum(
            sizes[i] if action == "+" else -sizes[i] if action == "-" else 0
            for action, i in segment.events
        )
        live += segment.repeat * net
    return live


def weights_of(e: Estimate) -> int:
    return e.timeline.breakdown(e.phase_peaks[Phase.STEP])[Role.WEIGHTS]


def test_preferences_without_a_reference_are_twice_the_sequences() -> None:
    pairs, plain = priced(workload="dpo", reference=False, loss="hf"), priced(bs=4)
    assert (
        pairs.peak.nbytes == plain.peak.nbytes
        and pairs.replay.peak_reserved == plain.replay.peak_reserved
    )
    assert (
        pairs.time is not None
        and plain.time is not None
        and pairs.time.tokens_per_s == plain.time.tokens_per_s
    )


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_reference_is_a_copy_or_the_adapters_switched_off(method: str) -> None:
    without, with_it = (
        priced(workload="dpo", reference=reference, method=method) for reference in (False, True)
    )
    copied = 0 if method != "full" else 2 * SPEC_PARAMETERS
    assert in_use_at_end(with_it) - in_use_at_end(without) == pytest.approx(copied, rel=1e-3, abs=1)
    assert with_it.time is not None and without.time is not None
    device = [sum(phase.device_s for phase in e.time.phases) for e in (without, with_it)]
    assert 1.1 < device[1] / device[0] < 1.6  # one forward more, no backward
    assert with_it.peak.nbytes >= without.peak.nbytes


def count_parameters() -> int:
    """Parameters of SPEC by hand: embedding, head, layers of attention, MLP and two norms, last
    norm."""
    h, f, v, kv, layers = 256, 704, 5000, 128, 3
    return 2 * v * h + layers * (2 * h * h + 2 * h * kv + 3 * h * f + 2 * h) + h


SPEC_PARAMETERS = count_parameters()


def test_reference_runs_while_the_policys_activations_are_held() -> None:
    e = priced(workload="dpo", checkpointing="none", ctx=2048)
    names = [segment.name for segment in e.timeline.segments]
    first = next(
        i
        for i, name in enumerate(names)
        if name.startswith("reference: ") and e.timeline.segments[i].phase is Phase.FORWARD
    )
    assert any(name == "CausalLmHead" for name in names[e.timeline.step_starts[0] : first])
    assert all(
        s.phase is not Phase.BACKWARD
        for s in e.timeline.segments[e.timeline.step_starts[0] : first]
    )
    g = priced(workload="grpo", ctx=2048, reference=True)
    order = [s.name for s in g.timeline.segments[g.timeline.step_starts[0] :]]
    rollout, reference, own = (
        next(i for i, n in enumerate(order) if n.startswith(start))
        for start in ("rollout", "reference", "model")
    )
    assert rollout < reference < own


@pytest.mark.parametrize(("accumulation", "told"), [(1, ""), (3, " of micro-batch 2")])
def test_a_peak_in_a_reference_names_it_and_its_micro_batch(accumulation: int, told: str) -> None:
    """Where gradients wait, the second micro-batch is the first that finds them."""
    options = {"workload": "dpo", "data_parallel": "fsdp2", "gpus": 2, "loss": "chunked"}
    options |= {"bs": 1, "ctx": 4096, "grad_accum": accumulation, "checkpointing": "full"}
    e = estimate("llama-3.2-1b", train_config(options))
    named = moment(e.timeline, e.peak)
    assert named.startswith("forward of reference: ") and named.endswith(told)
    assert ("micro-batch" in named) is bool(told)


@pytest.mark.parametrize("workload", ["dpo", "kto", "grpo", "rloo"])
def test_our_kernels_score_labels_without_logits(workload: str) -> None:
    """Of the policy and of its reference, whatever the batch: a chunk at a time."""
    options = {"workload": workload, "method": "lora", "precision": "bf16-autocast", "bs": 64}
    e = priced(kernels="napkinmath", **options)
    logits = [t for t in e.timeline.tensors if t.role is Role.LOGITS]
    held = priced(loss="hf", **options)
    rows_of_logits = 2 * 64 * 511 * 5000
    assert max(t.requested for t in held.timeline.tensors) >= rows_of_logits
    assert (
        max(t.requested for t in logits) <= 2**28 < rows_of_logits
    )  # of a chunk, or of TRL's tile
    names = {t.name for t in e.timeline.tensors}
    assert "gradients of the log-probabilities, kept" in names  # and no logits made again


def test_forwards_before_the_update() -> None:
    """The policy scores its rollouts where that is asked for; a critic's values are needed always."""
    forwards: dict[tuple[str, bool | None], set[str]] = {}
    for workload in ("grpo", "rloo", "ppo"):
        for scored in (None, True, False):
            asked = {} if scored is None else {"old_logprobs": scored}
            steps = priced(workload=workload, **asked).step.micro_steps
            forwards[workload, scored] = {
                segment.name.partition(":")[0] for _, segments in steps for segment in segments
            }
    scores, values = "log-probabilities of the rollout", "values of the rollout"
    for (workload, scored), names in forwards.items():
        assert (scores in names) is (workload == "rloo" if scored is None else scored)
        assert (values in names) is (workload == "ppo")
    with pytest.raises(InputError, match="generates nothing"):
        priced(workload="dpo", old_logprobs=True)


def test_reward_model_has_no_logits() -> None:
    e, plain = priced(workload="reward"), priced(bs=4)
    logits = 4 * 512 * 5000 * 2
    assert all(
        e.timeline.breakdown(point).get(Role.LOGITS, 0) < logits / 100
        for point in e.phase_peaks.values()
    )
    assert plain.breakdown[Role.LOGITS] > logits
    assert e.num_parameters == SPEC_PARAMETERS - 5000 * 256 + 256


def test_teacher_brings_its_weights_and_ten_tensors_of_logits() -> None:
    e, plain = priced(workload="distill", teacher="gpt2"), priced()
    teacher = estimate("gpt2", train_config({"precision": "bf16"}))
    assert in_use_at_end(e) - in_use_at_end(plain) == pytest.approx(
        2 * teacher.num_parameters, rel=0.02
    )
    alike = read_config(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 50257,
            "num_hidden_layers": 1,
        }
    )
    one = estimate(alike, train_config({**BASE, "workload": "distill", "teacher": "gpt2"}))
    wide = 4 * 2 * 512 * 50257  # fp32 under autocast, as accelerate returns them
    for phase, tensors in ((Phase.FORWARD, 10), (Phase.BACKWARD, 6)):
        assert one.timeline.breakdown(one.phase_peaks[phase])[Role.LOGITS] == pytest.approx(
            tensors * wide, rel=0.02
        )
    chunked, without = (
        priced(loss="chunked", **more) for more in ({"workload": "distill", "teacher": "gpt2"}, {})
    )
    assert (
        chunked.timeline.breakdown(chunked.phase_peaks[Phase.BACKWARD])[Role.LOGITS]
        == without.breakdown[Role.LOGITS]
    )
    assert (
        without.time is not None
        and chunked.time is not None
        and chunked.time.seconds > without.time.seconds
    )


@pytest.mark.parametrize(
    ("model", "workload", "found"),
    [("llama-7b", "distill", True), ("gpt2-medium", "distill", False), ("llama-7b", "grpo", False)],
)
def test_vocabularies_that_differ_are_a_finding(model: str, workload: str, found: bool) -> None:
    """Of a teacher, not of a reward model, which reads text."""
    e = estimate(model, train_config({**BASE, "workload": workload, "teacher": "gpt2"}))
    told = [f.text for f in e.findings if "vocabulary" in f.text]
    assert bool(told) is found
    if told:
        assert "50,257" in told[0] and "32,000" in told[0]


@pytest.mark.parametrize(
    ("options", "tokens"), [({"workload": "grpo"}, 512), ({"generate": 300}, 812)]
)
def test_cache_of_generation_is_that_of_inference(options: dict[str, object], tokens: int) -> None:
    e = priced(method="lora", **options)
    cached = {i for i, t in enumerate(e.timeline.tensors) if t.name in ("key cache", "value cache")}
    held = sum(
        s.repeat * e.timeline.tensors[i].nbytes
        for s in e.timeline.segments
        if s.phase in (Phase.ROLLOUT, Phase.EVALUATE) and s.name.endswith("whole")
        for a, i in s.events
        if a == "+" and i in cached
    )
    runs = len([s for s in e.timeline.segments if "next token" in s.name])
    assert held == runs * kv_cache_bytes(SPEC, batch=2, tokens=tokens)


def test_critic_is_trained_beside_the_policy() -> None:
    ppo, grpo = (
        priced(workload="ppo", optimizer="adamw-fused"),
        priced(workload="grpo", optimizer="adamw-fused"),
    )
    states = [e.timeline.breakdown(e.phase_peaks[Phase.STEP])[Role.OPTIMIZER] for e in (ppo, grpo)]
    critic = SPEC_PARAMETERS - 5000 * 256 + 256
    assert states[0] / states[1] == pytest.approx(
        (SPEC_PARAMETERS + critic) / SPEC_PARAMETERS, rel=1e-2
    )
    assert ppo.num_trained == SPEC_PARAMETERS + critic
    spent = [{p.phase: p.device_s for p in e.time.phases} for e in (ppo, grpo) if e.time]
    # trl ppo_trainer.py batch_generation(unwrapped_model.policy, ...): a critic generates nothing
    assert spent[0].pop(Phase.ROLLOUT) == spent[1].pop(Phase.ROLLOUT)
    assert sum(spent[0].values()) > 1.5 * sum(spent[1].values())


def test_rollout_reads_every_weight_for_each_token() -> None:
    short, long = (
        priced(workload="grpo", completion=tokens, reference=False) for tokens in (64, 256)
    )
    times = [
        dict((p.phase, p) for p in e.time.phases)[Phase.ROLLOUT].device_s
        for e in (short, long)
        if e.time is not None
    ]
    assert times[1] == pytest.approx(4 * times[0], rel=0.05)
    assert times[0] > 64 * 2 * SPEC_PARAMETERS / find_hardware("a100-80").gpu.bandwidth_bytes_per_s


def test_evaluation_can_be_the_peak_and_takes_no_step_time() -> None:
    plain, small, large = priced(), priced(eval_bs=1), priced(eval_bs=64)
    assert plain.time is not None and large.time is not None
    assert plain.time.seconds == large.time.seconds and plain.peak.nbytes == small.peak.nbytes
    assert next(iter(large.phase_peaks)) is Phase.EVALUATE and large.peak.nbytes > plain.peak.nbytes
    grown = priced(eval_bs=128).peak.nbytes - large.peak.nbytes
    assert grown == pytest.approx(
        2 * (large.peak.nbytes - priced(eval_bs=32).peak.nbytes), rel=0.02
    )
    assert grown >= 64 * 512 * 5000 * (2 + 4)  # 16-bit logits and their fp32 copy at least


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_checkpoints_kept_on_the_host_are_those_of_what_is_trained(name: str) -> None:
    """A model beside the policy runs without gradients: it has none."""
    offloaded = priced(**KINDS[name], checkpointing="offload")
    kept = priced(**KINDS[name], checkpointing="full")
    assert offloaded.host_bytes > kept.host_bytes
    assert offloaded.memory.requested <= kept.memory.requested


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_leaks_and_a_sweep_agrees(name: str, method: str) -> None:
    options = {**BASE, **KINDS[name], "method": method}
    config = train_config(options)
    one = estimate(SPEC, config, hardware="a100-80")
    assert one.replay.peak_allocated >= one.peak.nbytes
    states_on = estimate(SPEC, config, hardware="a100-80").timeline
    assert states_on.peak() == one.peak
    lived = in_use_at_end(one)
    more = in_use_at_end(estimate(SPEC, config.replace(sequence_length=1024), hardware="a100-80"))
    assert lived == more  # what stays does not depend on the batch's length
    found = sweep(SPEC, config, sequence_length=[128, 512, 1000], hardware=find_hardware("a100-80"))
    assert (
        found.requested[1] == one.peak.nbytes
        and found.tokens_per_s is not None
        and one.time is not None
    )
    assert found.tokens_per_s[1] == pytest.approx(one.time.tokens_per_s, rel=1e-12)


@pytest.mark.slow
def test_batches_of_pairs_are_counted_as_pairs_everywhere() -> None:
    options = {"model": "gpt2", "workload": "dpo", "bs": "1,3", "gpu": "l4", "ctx": 256}
    fast, exact = (
        list(Grid(options, [], exact=flag, exact_below=0).rows()) for flag in (False, True)
    )
    pair = estimate("gpt2", workload="dpo", bs=3, ctx=256, gpu="l4")
    assert fast[1][0] == exact[1][0] == 3 and fast[1][1] == exact[1][1] == pair.peak.nbytes
    space = open_space(
        read_model("gpt2"),
        [Machine(hardware=find_hardware("l4"))],
        {"workload": ["dpo"], "ctx": ["256"], "bs": ["3"], "method": ["full"]},
        Goal.TOKENS,
    )
    best = plan(space, Goal.TOKENS, top=1).best[0]
    assert dict(best.options)["bs"] == 3 and best.estimate.config.micro_batch_size == 6
    limit = largest_batch(
        estimate("gpt2", train_config({"workload": "dpo", "ctx": 256}), hardware="l4")
    )
    assert limit.at is not None and limit.at.config.micro_batch_size == 2 * limit.fits


@pytest.mark.parametrize(
    "flags",
    [
        "--workload distill",
        "--workload sft --teacher gpt2",
        "--workload nonsense",
        "--workload distill --teacher gpt2 --gpus 4 --pp 2",
        "--workload grpo --gpus 4 --tp 2",
        "--workload grpo --ctx 512 --completion 600",
        "--workload sft --eval-bs 4 --gpus 4 --pp 2",
        "--workload dpo --gpus 4 --data-parallel dp",
        "--workload kto --teacher gpt2",
        "--workload grpo --teacher gpt2 --teacher-topk 64",
        "--workload distill --teacher gpt2 --teacher-topk -1",
        "--workload distill --teacher gpt2 --teacher-topk 64 --loss chunked",
        "--workload dpo --teacher-at apart",
        "--workload distill --teacher gpt2 --teacher-at swap",
        "--workload reward --reference-at whole",
        "--workload dapo --reference-at whole",
        "--workload dpo --lora --reference-at offload",
        "--eval-bs 0",
        "--workload distill --teacher no-such-model",
    ],
)
def test_what_makes_no_sense_is_refused(flags: str) -> None:
    done = run("--model", "gpt2", "--gpu", "a100-80", *flags.split())
    assert done.code == 2 and len(done.err.splitlines()) == 1


NO_POLICIES = {
    "bert-base --workload dpo": "masked-lm",
    "t5-small --workload grpo": "seq2seq-lm",
    "vit-base --workload kto": "image-classification",
    "wav2vec2-base --workload orpo": "ctc",
    "qwen3-embedding-0.6b --workload grpo --rollout vllm --gpu h100": "feature-extraction",
    "qwen3-0.6b --task sequence-classification --workload ppo": "sequence-classification",
}


@pytest.mark.parametrize("line", NO_POLICIES)
def test_a_model_that_no_trainer_takes_is_refused_by_its_task(line: str) -> None:
    """`bert-base --workload dpo` was said to fit."""
    done = run(*line.split())
    assert done.code == 2 and f"is for {NO_POLICIES[line]}" in done.err
    assert len(done.err.splitlines()) == 1
    scores = "qwen3-0.6b --task sequence-classification --workload reward"
    assert run(*scores.split()).code == 0


def test_report_names_the_late_peak() -> None:
    done = run(
        "--model", "llama-3.2-1b", "--lora", "--bs", "1", "--gpu", "rtx4090", "--eval-bs", "16"
    )
    assert "evaluat" in done.out and done.code in (1, 3)
    with pytest.raises(InputError, match="generates nothing"):
        estimate("bert-base", train_config({"generate": 16, "bs": 1}))


def test_trl_takes_log_probabilities_in_chunks_where_nothing_else_is_said() -> None:
    given = {**BASE, "workload": "dpo"}
    e = estimate(SPEC, train_config(given))
    assert e.config.loss is Loss.CHUNKED and any("--loss hf" in text for text in e.assumptions)
    for other in (
        {"loss": "hf"},
        {"kernels": "liger"},
        {"stack": "torchtune"},
        {"workload": "orpo"},
    ):
        assert train_config({**given, **other}).loss is Loss.HF
    rolled = {**BASE, "workload": "grpo", "rollout": "vllm"}
    assert train_config({**rolled, "rollout_trainer": "verl"}).loss is Loss.HF
    assert train_config({**rolled, "rollout_trainer": "trl"}).loss is Loss.CHUNKED


@pytest.mark.parametrize(
    ("said", "assumed"),
    [
        ({}, "no reference, as trl runs none"),
        ({"reference": False}, ""),
        ({"reference": True}, ""),
        ({"stack": "trl-0.14"}, "a reference, as trl runs one"),
        ({"rollout_trainer": "verl"}, "no reference, as verl runs none"),
        ({"rollout_trainer": "ms-swift"}, "a reference, as ms-swift runs one"),
        ({"workload": "rloo"}, "a reference, as trl runs one"),
        ({"workload": "dapo"}, ""),
    ],
)
def test_a_trainer_of_rollouts_has_its_own_reference_where_nothing_is_said(
    said: dict[str, object], assumed: str
) -> None:
    e = priced(**{"workload": "grpo", **said})
    found = [line for line in assumptions(e) if "reference" in line]
    assert [line for line in found if assumed and line.startswith(assumed)] == found
    assert bool(found) is bool(assumed)
    runs = any(segment.name.startswith("reference") for segment in e.timeline.segments)
    assert runs is (assumed.startswith("a ") or said.get("reference") is True)


def test_a_place_for_a_reference_asks_for_one() -> None:
    e = priced(workload="grpo", reference_at="sharded", data_parallel=["fsdp2"], gpus=2)
    assert any(segment.name.startswith("reference") for segment in e.timeline.segments)


def test_rollouts_are_scored_in_batches_of_their_own() -> None:
    """All logits of the rows that are scored at a time; as many rows as an update takes change no
    byte of what lives at once; every rollout is scored once."""
    same = {"workload": "grpo", "rollout": "none", "rollout_trainer": "verl", "old_logprobs": True}
    by_rows = {
        rows: priced(**same, bs=2, grad_accum=32, **({"score_bs": rows} if rows else {}))
        for rows in (0, 2, 32, 64)
    }
    assert by_rows[2].memory.requested == by_rows[0].memory.requested
    vocabulary = dict(SPEC.symbols)["v"]
    grown = by_rows[64].memory.requested - by_rows[32].memory.requested
    assert grown > 32 * 512 * vocabulary * 2  # in bf16
    scored = {
        rows: sum(
            times
            for times, segments in e.step.micro_steps
            if any(segment.name.startswith("log-probabilities") for segment in segments)
        )
        for rows, e in by_rows.items()
    }
    assert scored == {0: 32, 2: 32, 32: 2, 64: 1}


def test_transformers_generates_in_batches_of_their_own() -> None:
    few, all_at_once = (
        priced(workload="grpo", bs=2, grad_accum=4, ctx=2048, **more)
        for more in ({"score_bs": 2}, {})
    )
    assert few.time is not None and all_at_once.time is not None
    assert few.time.seconds > all_at_once.time.seconds
    held = [e.phase_peaks[Phase.ROLLOUT].nbytes for e in (few, all_at_once)]
    assert held[0] < held[1]


@pytest.mark.parametrize(
    "more", [{}, {"workload": "grpo", "rollout": "none", "pp": 2, "gpus": 2}], ids=["sft", "pp"]
)
def test_rows_that_are_scored_need_rollouts_and_no_pipeline(more: dict[str, object]) -> None:
    with pytest.raises(InputError, match="--score-bs"):
        priced(score_bs=2, **more)


@pytest.mark.parametrize("more", [{"score_bs": 2, "old_logprobs": True}, {"rollout": "hf"}])
def test_a_forward_before_the_first_micro_step_is_gone_back_to(more: dict[str, object]) -> None:
    """FSDP2 remembers the units of every forward until a backward is over, so that the first backward
    after a forward without gradients ends with a gather of that one's last unit, which nobody reads.
    torch 2.13 with two scored batches before two micro-steps: the first prefetches the head last, the
    second does not."""
    asked = {"workload": "grpo", "rollout": "none", "data_parallel": ["fsdp2"], "gpus": 2}
    e = priced(**{**asked, "grad_accum": 3, **more})
    backwards = [
        [
            tensor.module
            for segment in segments
            for action, tensor in segment.events
            if segment.phase is Phase.BACKWARD
            and action is ALLOC
            and tensor.name == "all-gather output"
        ]
        for _, segments in e.step.micro_steps
    ]
    ends = [gathered[-1] for gathered in backwards if gathered]
    assert ends[0] == "" and set(ends[1:]) == {"model"}
