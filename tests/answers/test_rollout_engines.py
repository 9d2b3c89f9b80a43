"""An inference engine beside a training: its bytes and seconds in the step, and placements that
cannot be."""

from __future__ import annotations

import pytest
from napkinmath.answers.estimate import Estimate
from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.base.units import MIB
from napkinmath.catalog.engines import find_engine
from napkinmath.catalog.gpus import find_hardware
from napkinmath.cli.main import main
from napkinmath.estimate import estimate
from napkinmath.ir.ledger import Phase, Role, Tensor
from napkinmath.lowering.rollout.asleep import asleep_bytes
from napkinmath.lowering.rollout.plan import EnginePlan
from napkinmath.lowering.rollout.served import ServedProduct
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.serving import EngineClock

BASE: dict[str, object] = {
    "workload": "grpo",
    "reference": False,
    "gpu": "h100",
    "bs": 2,
    "ctx": 512,
    "checkpointing": "full",
    "rollout": "vllm",
}


def priced(**options: object) -> Estimate:
    return estimate("qwen2.5-0.5b", **{**BASE, **options})


def plan_of(e: Estimate) -> EnginePlan:
    plan = e.ranks.policy.rollout
    assert isinstance(plan, EnginePlan)
    return plan


def held(e: Estimate) -> int:
    """Bytes of the engine at the peak of the step."""
    return e.timeline.breakdown(e.peak).get(Role.ENGINE, 0)


def seconds(e: Estimate, phase: Phase) -> float:
    assert e.time is not None
    return sum(p.seconds for p in e.time.phases if p.phase is phase)


def test_the_engine_holds_its_share_and_its_graphs() -> None:
    e = priced()
    plan, memory = plan_of(e), e.hardware.memory_bytes if e.hardware else 0
    assert plan.weight_bytes + plan.cache_bytes + plan.forward_bytes == int(0.3 * memory)
    assert held(e) == pytest.approx(
        plan.weight_bytes + plan.cache_bytes + plan.graph_bytes, abs=2048
    )
    more = priced(rollout_memory=0.5)
    assert more.peak.nbytes - e.peak.nbytes == pytest.approx(0.2 * memory, rel=1e-6)


def test_the_training_peaks_as_if_alone_while_the_engine_sleeps() -> None:
    alone, awake, asleep = priced(rollout="hf"), priced(), priced(rollout_sleep=2)
    peaks = [e.phase_peaks[Phase.BACKWARD].nbytes for e in (alone, awake, asleep)]
    graphs = plan_of(asleep).graph_bytes
    assert peaks[2] - peaks[0] == pytest.approx(graphs, abs=2048)
    assert peaks[1] - peaks[2] == pytest.approx(
        plan_of(awake).weight_bytes + plan_of(awake).cache_bytes, abs=2048
    )
    # awake or not, it generates beside the policy's weights and states
    assert held(asleep) or asleep.peak.nbytes == peaks[2]
    late = asleep.phase_peaks[Phase.ROLLOUT].nbytes
    assert late >= plan_of(asleep).weight_bytes + plan_of(asleep).cache_bytes


def test_sleep_level_one_keeps_the_weights_on_the_host_and_takes_longer() -> None:
    one, two = priced(rollout_sleep=1), priced(rollout_sleep=2)
    assert seconds(one, Phase.ROLLOUT) > seconds(two, Phase.ROLLOUT)
    kept = [t for t in one.timeline.tensors if t.name == "engine weights asleep"]
    assert [t.host_bytes for t in kept] == [asleep_bytes(plan_of(one))]


def test_an_engine_is_faster_than_transformers_and_grows_with_tokens() -> None:
    hf, engine, longer = (
        priced(rollout="hf", completion=128),
        priced(completion=128),
        priced(completion=256),
    )
    spent = [seconds(e, Phase.ROLLOUT) for e in (hf, engine, longer)]
    assert spent[1] < spent[0] / 3 and 1.5 < spent[2] / spent[1] < 2.5
    trained = [seconds(e, Phase.BACKWARD) for e in (hf, engine)]
    assert trained[0] == trained[1]


def test_engines_of_their_own_take_time_and_no_memory_here() -> None:
    apart = priced(rollout_gpus="2xH100")
    assert held(apart) == 0 and seconds(apart, Phase.ROLLOUT) > 0
    alone = priced(rollout="hf").phase_peaks[Phase.BACKWARD].nbytes
    assert apart.phase_peaks[Phase.BACKWARD].nbytes == alone


def test_ranks_of_one_engine_share_weights_and_prompts() -> None:
    mesh = {"gpus": "8xH100", "data_parallel": "fsdp2", "gpu": None}
    options = {key: value for key, value in {**BASE, **mesh}.items() if value is not None}
    one, two = (estimate("qwen2.5-7b", **options, rollout_tp=n) for n in (1, 2))
    assert plan_of(two).weight_bytes == pytest.approx(plan_of(one).weight_bytes / 2, rel=1e-3)
    assert (plan_of(one).sequences_for_each, plan_of(two).sequences_for_each) == (1, 2)
    gathered = [t for t in one.timeline.tensors if "on its way" in t.name]
    # the widest parameter is materialized whole: 152,064 x 3,584 in the fp32 that FSDP 2 keeps
    assert max(t.nbytes for t in gathered) == 152064 * 3584 * 4


SPREAD: dict[str, object] = {**{k: v for k, v in BASE.items() if k != "gpu"}, "gpus": "4xH100"}
# qwen2.5-0.5b: the embedding, which is also the head, is the largest parameter
EMBEDDING, NORM = 151936 * 896, 896


def on_the_way(**options: object) -> int:
    """Most bytes between policy and engine at once, on a rank of four."""
    e = estimate("qwen2.5-0.5b", **{**SPREAD, "rollout_sleep": 2, **options})
    line = e.timeline
    at = [i for i, s in enumerate(line.segments) if s.phase is Phase.ROLLOUT]
    peaks = {line.segments[p.segment].name: p for p in line.segment_peaks(at)}
    held = {name: line.breakdown(p).get(Role.COMMUNICATION, 0) for name, p in peaks.items()}
    return max(held.values()) - held["rollout: generation"]


def test_weights_are_whole_as_each_trainer_has_them() -> None:
    """Sources of the expectations: the functions that catalog/rollout_trainers.py names."""
    fsdp2 = on_the_way(data_parallel="fsdp2")
    assert fsdp2 == 4 * EMBEDDING  # one after the other, in the fp32 that FSDP 2 keeps
    assert on_the_way(data_parallel="fsdp1") == pytest.approx(4 * (EMBEDDING + NORM), abs=1024)
    assert on_the_way(data_parallel="zero3") == 2 * EMBEDDING
    whole = 2 * estimate("qwen2.5-0.5b").num_parameters
    adapters = on_the_way(data_parallel="zero3", method="lora")
    assert adapters == pytest.approx(whole, rel=2e-3)
    assert on_the_way(data_parallel="ddp") == 0
    # ZeRO stages 1 and 2 keep parameters whole: ms-swift, which has all whole at once, gathers none
    # (rollout_mixin.py _collect_state_dict_for_vllm: param.data, no clone)
    for stage in ("zero1", "zero2"):
        assert on_the_way(data_parallel=stage, rollout_trainer="ms-swift", rollout_memory=0.3) == 0


def test_buckets_and_state_dicts_are_copies() -> None:
    verl: dict[str, object] = {"rollout_trainer": "verl", "rollout_bucket": "1GiB"}
    bucket = on_the_way(data_parallel="fsdp2", **verl)
    assert bucket == (1 << 30) + (4 + 2) * EMBEDDING
    # FSDP 1's state dict holds a second copy of the rank's quarter, in fp32
    copies = on_the_way(data_parallel="fsdp1", **verl) - bucket
    assert copies == pytest.approx(estimate("qwen2.5-0.5b").num_parameters, rel=1e-3)


def test_what_waits_on_the_host_makes_room() -> None:
    stays, optimizer, policy = (
        priced(rollout_sleep=2, rollout_offload=what) for what in ("none", "optimizer", "policy")
    )
    peaks = [e.phase_peaks[Phase.ROLLOUT].nbytes for e in (stays, optimizer, policy)]
    parameters = 2 * stays.num_parameters
    assert peaks[0] - peaks[1] == pytest.approx(2 * parameters, rel=1e-3)  # two states, bf16
    assert peaks[1] - peaks[2] == pytest.approx(parameters, rel=1e-3)
    trained = [e.phase_peaks[Phase.BACKWARD].nbytes for e in (stays, policy)]
    assert trained[0] == trained[1]
    assert seconds(stays, Phase.ROLLOUT) < seconds(policy, Phase.ROLLOUT)
    assert policy.timeline.host_peak() == pytest.approx(3 * parameters, rel=1e-2)


def test_an_engine_that_wakes_whole_has_its_cache_beside_weights_on_their_way() -> None:
    """verl's releases before 0.4 wake weights and cache together, today's the cache once they have
    come (verl v0.3.0.rc0 workers/sharding_manager/fsdp_vllm.py)."""
    options = {"gpus": 2, "data_parallel": "fsdp1", "rollout_tp": 1}
    apart, whole = (priced(rollout_trainer=name, **options) for name in ("verl", "verl-0.3"))
    most = {}
    for name, e in (("apart", apart), ("whole", whole)):
        sent = [
            s
            for _, segments in e.step.micro_steps
            for s in segments
            if "weights to the engine" in s.name or s.name == "rollout: engine wakes"
        ]
        events = [event for s in sent for event in s.events]
        most[name] = [t.name for action, t in events if action == "+" and isinstance(t, Tensor)]
    assert "engine cache" in most["whole"] and "engine cache" not in most["apart"]
    late = whole.phase_peaks[Phase.ROLLOUT].nbytes - apart.phase_peaks[Phase.ROLLOUT].nbytes
    assert 0 < late < plan_of(whole).cache_bytes


def test_a_sleeping_engine_returns_its_memory_to_the_device() -> None:
    """Reserved bytes are those of the larger of the two, not of both."""
    settings = {"rollout_memory": 0.1, "rollout_sleep": 2, "old_logprobs": False, "loss": "hf"}
    e = priced(**settings, ctx=2048, bs=4)
    rollout, trained = (e.phase_peaks[p].nbytes for p in (Phase.ROLLOUT, Phase.BACKWARD))
    engine = 0.1 * 79 * 2**30
    assert engine < rollout < trained
    assert e.replay.peak_reserved < trained + 0.5 * engine  # the rest is the training's own cache


def test_four_bits_of_the_base_stay_four_in_trls_engine() -> None:
    packed, whole = (priced(method="qlora", rollout_trainer=t) for t in ("trl", "verl"))
    assert plan_of(packed).weight_bytes < 0.75 * plan_of(whole).weight_bytes


REFUSED: dict[str, dict[str, object]] = {
    "use one of 1, 2, 4, 8": {"rollout_tp": 3, "gpus": "8xH100", "data_parallel": "ddp"},
    "is enough": {"rollout_memory": 0.01},
    "divide by rollout_tp=4": {"rollout_tp": 4, "gpus": "4xH100", "data_parallel": "ddp"},
    "write e.g. 2xH100": {"rollout_gpus": "2H100"},
    "leave it out with": {"rollout_gpus": "2xH100", "rollout_sleep": 1},
    "generates nothing": {"workload": "dpo"},
    "without an engine": {"rollout": "hf", "rollout_tp": 2},
    "did you mean vllm": {"rollout": "vlm"},
    "did you mean verl": {"rollout_trainer": "verll"},
    "GPUs of their own; add": {"rollout_trainer": "openrlhf"},
    "use --rollout-sync bucket": {"rollout_bucket": 1 << 20, "rollout_sync": "layer"},
    "leave it out with --rollout-gpus": {"rollout_gpus": "2xH100", "rollout_offload": "policy"},
}


@pytest.mark.parametrize("told", REFUSED)
def test_placements_that_cannot_be_are_refused_with_the_way_out(told: str) -> None:
    options = {**BASE, **REFUSED[told]}
    if "gpus" in options:
        del options["gpu"]
    with pytest.raises(InputError, match=told):
        estimate("qwen2.5-0.5b", **options)


def test_the_share_that_is_said_to_be_enough_is() -> None:
    with pytest.raises(InputError) as refused:
        priced(rollout_memory=0.01)
    words = str(refused.value).partition("; --rollout-memory ")[2].split()
    assert words[1:] == ["is", "enough"]
    assert plan_of(priced(rollout_memory=float(words[0]))).fitting(512) >= 1


@pytest.mark.parametrize(("offload", "there"), [("policy", False), ("optimizer", True)])
def test_buffers_of_gradients_are_dropped_with_the_policy(offload: str, there: bool) -> None:
    """Megatron's, which are kept between steps (verl offload_megatron_model_to_cpu)."""
    given = {**BASE, "gpus": 2, "tp": 2, "stack": "megatron", "rollout_trainer": "verl"}
    e = estimate("qwen2.5-0.5b", **given, rollout_sleep=2, rollout_offload=offload)
    generating = e.phase_peaks[Phase.ROLLOUT]
    assert (e.timeline.breakdown(generating).get(Role.GRADIENTS, 0) > 0) is there
    assert e.timeline.breakdown(e.phase_peaks[Phase.BACKWARD])[Role.GRADIENTS] > 0


def test_weights_asleep_lie_in_pinned_blocks_of_powers_of_two() -> None:
    """Qwen2.5 7B in bf16, by hand: a layer's gate and up (259 MiB) and down (129.5) in 512 and 256, q, k
    and v (31.5) and o (24.5) in 32 each; embeddings and head (1,039.5 each) in 2 GiB."""
    e = estimate("qwen2.5-7b", **{**BASE, "gpus": 2, "rollout_sleep": 1})
    plan = plan_of(e)
    by_hand = 28 * (512 + 256 + 32 + 32) + 2 * 2048
    assert asleep_bytes(plan) == pytest.approx(by_hand * MIB, rel=1e-3)
    assert asleep_bytes(plan) > 1.8 * plan.weight_bytes
    exact = plan.replace(engine=find_engine("sglang"))
    assert asleep_bytes(exact) == plan.weight_bytes


@pytest.mark.parametrize(
    ("trainer", "model", "processes", "models"),
    [
        ("verl", "qwen2.5-7b", 1, 1),  # the others hold meta tensors, one model after another
        ("verl", "qwen2.5-0.5b", 8, 1),  # whose head is its embedding
        ("trl", "qwen2.5-7b", 8, 2),
        ("openrlhf", "qwen2.5-7b", 8, 2),
    ],
)
def test_a_machine_reads_what_its_trainer_reads_at_once(
    trainer: str, model: str, processes: int, models: int
) -> None:
    given = {**BASE, "gpus": 8, "data_parallel": "fsdp1", "rollout_trainer": trainer}
    given |= {"reference": True, "rollout_memory": 0.5}
    e = estimate(model, **given)
    whole = 2 * e.num_parameters
    assert e.host_memory.loading_by == processes
    trained = 4 * e.num_parameters  # FSDP's, in fp32
    assert e.host_memory.loading == pytest.approx(
        processes * (trained + (models - 1) * whole), rel=0.01
    )


def test_ray_kills_a_task_before_the_machine_is_full() -> None:
    given = {**BASE, "gpus": 8, "data_parallel": "fsdp1", "rollout_trainer": "verl"}
    needed = estimate("qwen2.5-0.5b", **given).host_memory.needed
    tight = estimate("qwen2.5-0.5b", **given, host_ram=f"{int(needed / 0.97)}B")
    assert tight.verdict is Verdict.DOES_NOT_FIT
    assert any("Ray lets its tasks take 95%" in f.text for f in tight.findings)
    assert (
        estimate("qwen2.5-0.5b", **given, host_ram=f"{int(needed / 0.85)}B").verdict
        is not Verdict.DOES_NOT_FIT
    )


@pytest.mark.parametrize(
    ("place", "way"),
    [
        ({"gpu": "t4"}, "--rollout-gpus 2xT4 --rollout-tp 2"),
        ({"gpus": "4xt4"}, "--rollout-tp 2 --rollout-memory "),
    ],
    ids=["one GPU", "four"],
)
def test_more_gpus_that_are_said_to_be_enough_are(
    place: dict[str, str], way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of 14.2 GiB and 14.7 GiB of memory: no share is enough, and one GPU cannot be split."""
    flags = [word for key, value in place.items() for word in (f"--{key}", value)]
    line = ["qwen2.5-7b", "--workload", "grpo", "--rollout", "vllm", "--lora", *flags]
    assert main(line) == 2
    said = capsys.readouterr().err.strip()
    said = said.rpartition("; ")[2].removesuffix(" is enough")
    assert said.startswith(way)
    assert main([*line, *said.split()]) == 1  # an answer: the policy does not fit


def test_bitsandbytes_unpacks_first_for_more_than_a_few_rows() -> None:
    """Its own product is for few rows: for many a 16-bit copy is made on the way, and packed
    weights are slower than whole ones."""
    h100 = default_efficiency(find_hardware("h100").gpu)
    clock = EngineClock(plan_of(priced(method="qlora")).model, find_engine("vllm"), h100)
    packed = ServedProduct(name="down_proj", n=4096, k=14336, nbytes=4096 * 14336 // 2, packed=True)
    whole = packed.replace(nbytes=4096 * 14336 * 2, packed=False)
    few, many = ([clock.product_s(p, rows, rows) for p in (packed, whole)] for rows in (4, 64))
    assert few[0] < 0.5 * few[1] and many[0] > 1.5 * many[1]


def others_of_a_batch(e: Estimate) -> int:
    """Bytes of the layers that are whole beside one that goes to the engine."""
    bind = Bindings(dict(e.step.symbols))
    segments = [segment for _, some in e.step.micro_steps for segment in some]
    return max(
        (
            bind(payload.nbytes)
            for segment in segments
            for _, payload in segment.events
            if isinstance(payload, Tensor) and payload.name == "other layers of the batch"
        ),
        default=0,
    )


def test_batches_of_layers_are_whole_at_once() -> None:
    """24 layers: a batch of four has three beside the one that goes; 24 batches are one by one."""
    given: dict[str, object] = {"gpus": 2, "zero": 3, "precision": "bf16"}
    one, four, twelve = (others_of_a_batch(priced(**given, rollout_batches=n)) for n in (24, 6, 2))
    assert one == 0 and four * 11 == twelve * 3
    # queries, keys and values with biases, output, three of the feed-forward, two norms
    h, kv, f = 896, 128, 4864
    layer = h * (h + 2 * kv) + h + 2 * kv + h * h + 3 * h * f + 2 * h
    assert four == 3 * 2 * layer
    with pytest.raises(InputError, match="rollout-sync whole"):
        priced(**given, rollout_batches=6, rollout_sync="whole")


def test_an_engine_on_a_gpu_of_another_vendor_is_priced() -> None:
    """Its compute capability is the name of an architecture (gfx942)."""
    e = estimate("gpt-oss-20b", method="lora", gpu="mi300x", workload="grpo", rollout="vllm")
    assert e.throughput is not None
