"""Workloads on several GPUs: what each placement of a model that is not trained holds, gathers and
takes, and that no engine leaves anything behind."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.estimate import Estimate, estimate
from napkinmath.inputs.options import train_config
from napkinmath.ir.costs import Collective, HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, TAKE, Phase, Role, Tensor, Work
from napkinmath.ir.step import Step
from napkinmath.models.families import read_config

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
LAYER = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 704 + 2 * 256
PARAMETERS = 2 * 5000 * 256 + 3 * LAYER + 256
# below ZeRO's stage3_param_persistence_threshold of 100,000 elements: whole on every rank besides
SMALL = 3 * (2 * 256 * 256 + 2 * 256 * 128 + 2 * 256) + 256
RANKS = 4
KINDS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "kto": {},
    "orpo": {},
    "simpo": {},
    "reward": {},
    "prm": {},
    "grpo": {"teacher": "gpt2"},
    "dapo": {},
    "rloo": {},
    "ppo": {"teacher": "gpt2"},
    "distill": {"teacher": "gpt2"},
    "sft": {"eval_bs": 8, "generate": 20},
}
ENGINES = ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")


def priced(engine: str = "", **options: Any) -> Estimate:
    given = {"bs": 2, "ctx": 256, "precision": "bf16", "loss": "hf", **options}
    if engine:
        given |= {"data_parallel": engine, "gpus": RANKS}
    return estimate(SPEC, train_config(given), hardware="a100-80")


def left_by(step: Step) -> dict[str, int]:
    """Bytes that each micro-step leaves of tensors that are no gradients, by name."""
    live: dict[Tensor, int] = {}
    for times, segments in step.micro_steps:
        for segment in segments:
            for action, payload in segment.events:
                if action == TAKE:
                    given, taken = payload
                    live[given] = live.get(given, 0) - times * segment.repeat
                    live[taken] = live.get(taken, 0) + times * segment.repeat
                elif action in (ALLOC, FREE):
                    sign = 1 if action == ALLOC else -1
                    live[payload] = live.get(payload, 0) + sign * times * segment.repeat
    kept = (Role.GRADIENTS, Role.COMMUNICATION)
    return {t.name: n for t, n in live.items() if n and t.role not in kept}


def gathered_by(e: Estimate, start: str) -> int:
    """Bytes of the all-gathers of segments whose name begins so, over a step."""
    total = 0
    for times, segments in e.step.micro_steps:
        for s in segments:
            bind = Bindings({**e.step.symbols, **dict(s.symbols)})
            for action, payload in s.events:
                if action == RUN and isinstance(payload, Work) and s.name.startswith(start):
                    total += sum(
                        times * s.repeat * bind(cost.moved)
                        for cost in payload.costs
                        if isinstance(cost, Collective) and cost.kind == "all-gather"
                    )
    return total


def stored(e: Estimate) -> int:
    """Weights that a rank holds of the reference, in bytes."""
    total = 0
    for segment in e.step.load:
        if segment.name.startswith("reference: "):
            bind = Bindings({**e.step.symbols, **dict(segment.symbols)})
            for action, payload in segment.events:
                if isinstance(payload, Tensor):
                    sign = 1 if action == ALLOC else -1
                    total += sign * segment.repeat * bind(payload.nbytes)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_workload_is_priced_under_every_engine_and_leaves_nothing(
    kind: str, method: str
) -> None:
    alone = priced(workload=kind, method=method, **KINDS[kind])
    names = left_by(alone.step)
    for engine in ENGINES:
        e = priced(engine, workload=kind, method=method, **KINDS[kind])
        assert left_by(e.step).keys() <= names.keys() | {"gathered flat parameter"}, engine
        assert e.time is not None and e.peak.nbytes > 0


@pytest.mark.parametrize(
    ("engine", "at", "held"),
    [
        ("", "auto", 1),
        ("ddp", "auto", 1),
        ("zero1", "auto", 1),
        ("zero2", "auto", 1),
        ("zero3", "auto", 1 / RANKS),
        ("fsdp2", "auto", 1 / RANKS),
        ("fsdp2", "sharded", 1 / RANKS),
        ("fsdp1", "sharded", 1 / RANKS),
        ("fsdp2", "whole", 1),
        ("zero3", "whole", 1),
        ("ddp", "offload", 0),
        ("fsdp2", "offload", 0),
        ("zero3", "apart", 0),
    ],
)
def test_a_rank_holds_its_part_of_the_reference(engine: str, at: str, held: float) -> None:
    e = priced(engine, workload="dpo", reference_at=at)
    whole = SMALL if (engine, at) == ("zero3", "auto") else 0
    assert stored(e) == pytest.approx(2 * (held * PARAMETERS + whole), rel=0.01)


def test_fsdp1_never_lets_the_root_of_a_reference_go() -> None:
    """torch's _post_forward_reshard leaves it for a backward that never comes."""
    trl, verl = (
        stored(priced("fsdp1", workload="dpo", reference_at=at)) for at in ("auto", "sharded")
    )
    assert trl - verl == pytest.approx(2 * (2 * 5000 * 256 + 256), rel=0.01)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_a_sharded_reference_is_gathered_once_a_forward(engine: str) -> None:
    e, whole = priced(engine, workload="dpo"), SMALL if engine == "zero3" else 0
    assert gathered_by(e, "reference: ") == pytest.approx(2 * (PARAMETERS - whole), rel=0.01)
    assert gathered_by(priced(engine, workload="dpo", reference_at="whole"), "reference: ") == 0


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_adapters_switched_off_gather_the_policys_layers_again(engine: str) -> None:
    with_it, without = (
        priced(engine, workload="dpo", method="lora", reference=flag) for flag in (True, False)
    )
    more = gathered_by(with_it, "") - gathered_by(without, "")
    # FSDP2's head waits for the backward, ZeRO keeps what is small: the rest is gathered
    least = 3 * LAYER if engine == "fsdp2" else PARAMETERS - SMALL
    assert 2 * least * 0.99 <= more <= 2 * PARAMETERS * 1.01


def test_offloading_a_reference_takes_time_and_gives_its_bytes_back() -> None:
    beside, swapped = (
        priced("ddp", workload="grpo", reference=True, reference_at=at, ctx=64)
        for at in ("auto", "offload")
    )
    assert beside.time is not None and swapped.time is not None
    assert swapped.time.seconds > beside.time.seconds
    assert swapped.host_bytes - beside.host_bytes == pytest.approx(2 * PARAMETERS, rel=0.01)
    held = [e.phase_peaks[Phase.STEP].nbytes for e in (beside, swapped)]
    assert held[0] - held[1] == pytest.approx(2 * PARAMETERS, rel=0.01)


def test_an_offloaded_reference_comes_once_for_all_micro_steps_of_a_rollout() -> None:
    """Rollouts are scored before any is trained on; pairs are scored as they are trained on."""
    sizes = {"reference_at": "offload", "ctx": 64, "grad_accum": 4}
    once, each = (priced("ddp", workload=w, **sizes) for w in ("grpo", "dpo"))

    def times(e: Estimate, what: str) -> int:
        rows = e.ranks.step(0).micro_steps
        return sum(n for n, row in rows for s in row if what in s.name and "embed" not in s.name)

    brought = [times(e, "to the device") for e in (once, each)]
    assert brought[1] == 4 * brought[0] > 0
    assert times(once, "reference: CompletionHead") == 4


@pytest.mark.parametrize(
    ("workload", "engine"), [("grpo", "ddp"), ("grpo", "fsdp2"), ("dpo", "ddp")]
)
def test_a_reference_in_the_policys_place_takes_no_memory_of_the_device(
    workload: str, engine: str
) -> None:
    """NeMo-RL's use_reference_model: the policy goes to the host, the reference over it, the policy
    comes back; two copies wait in host memory, and all micro-batches are scored in between."""
    sizes = {"workload": workload, "ctx": 64, "grad_accum": 4}
    alone = priced(engine, **sizes, reference=False)
    swapped = priced(engine, **sizes, reference_at="swap")
    own = 2 * PARAMETERS // (4 if engine == "fsdp2" else 1)
    rows = swapped.ranks.step(0).micro_steps
    moved = {True: 0, False: 0}
    for times, row in rows:
        for s in row:
            bind = Bindings({**swapped.step.symbols, **dict(s.symbols)})
            for _, what in s.events:
                for cost in what.costs if isinstance(what, Work) else ():
                    if isinstance(cost, HostCopy):
                        moved[cost.to_host] += times * s.repeat * bind(cost.moved)
    assert moved[True] == pytest.approx(own, rel=0.01)
    assert moved[False] == pytest.approx(2 * own, rel=0.01)
    assert swapped.memory.requested == pytest.approx(alone.memory.requested, rel=0.01)
    assert swapped.host_bytes - alone.host_bytes == pytest.approx(2 * own, rel=0.01)
    assert swapped.time is not None and alone.time is not None
    assert swapped.time.seconds > alone.time.seconds


def test_nemo_rl_swaps_its_reference_where_nothing_is_said() -> None:
    same = {"workload": "grpo", "rollout": "none", "rollout_trainer": "nemo-rl", "ctx": 64}
    left, swapped, whole = (
        priced("ddp", **same, **given).memory.requested
        for given in ({}, {"reference_at": "swap"}, {"reference_at": "whole"})
    )
    assert left == swapped == pytest.approx(whole - 2 * PARAMETERS, rel=1e-4)


@pytest.mark.parametrize("engine", ["", "ddp", "fsdp2", "pp"])
def test_a_teacher_of_largest_logits_and_its_student_are_on_the_gpu_in_turn(engine: str) -> None:
    """NeMo-RL algorithms/distillation.py: offload_after_refit on both sides; its loss gathers from
    one fp32 copy of the logits."""
    mesh: dict[str, Any] = {"pp": 2, "gpus": 2} if engine == "pp" else {}
    given = {"workload": "distill", "teacher": "gpt2", "teacher_topk": 8, "grad_accum": 2, **mesh}
    e = priced("" if engine == "pp" else engine, **given)
    assert not left_by(e.step)
    copies = {"to the host": 0, "back": 0}
    rows = [s.name for _, segments in e.step.micro_steps for s in segments]
    for name in rows:
        for what in copies:
            copies[what] += name.startswith("student: ") and name.endswith(what)
    assert copies["to the host"] == copies["back"] > 0
    last = max(i for i, name in enumerate(rows) if name.startswith("teacher: "))
    trained = [n for n in rows[last + 1 :] if not n.startswith("student: ")]
    own = [n for n in rows[:last] if not n.startswith(("teacher: ", "student: "))]
    assert trained and not own


def test_largest_logits_leave_no_tensor_of_the_vocabulary_beside_the_students() -> None:
    """trl's generalized_jsd_loss keeps three for its backward; here it is the fp32 gradient alone."""
    few, whole = (
        priced(workload="distill", teacher="gpt2", bs=8, **kept)
        for kept in ({"teacher_topk": 8}, {})
    )
    logits = 8 * 256 * 5000 * 4
    held = [e.timeline.breakdown(e.phase_peaks[Phase.BACKWARD])[Role.LOGITS] for e in (few, whole)]
    assert logits <= held[0] < 1.6 * logits and held[1] > 2.9 * logits


def test_zero3_gathers_the_whole_model_for_a_rollout() -> None:
    """trl unwrap_model_for_generation, ds3_gather_for_generation."""
    e = priced("zero3", workload="grpo", reference=False)
    gathered = 2 * (PARAMETERS - SMALL)
    assert gathered_by(e, "rollout: parameters") == pytest.approx(gathered, rel=0.01)
    names = [s.name for s in e.timeline.segments]
    first = next(i for i, name in enumerate(names) if name.startswith("rollout: prompt"))
    assert any(name.startswith("rollout: parameters") for name in names[:first])


def test_fsdp_gathers_every_layer_for_every_token_of_a_rollout() -> None:
    few, many = (
        gathered_by(priced("fsdp2", workload="grpo", reference=False, completion=n), "rollout")
        for n in (16, 32)
    )
    assert many - few == pytest.approx(16 * 2 * 3 * LAYER, rel=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"workload": "distill", "teacher": "smollm2-135m", "pp": 2},
        {"workload": "grpo", "tp": 2},
        {"workload": "grpo", "cp": 2},
        {"workload": "sft", "eval_bs": 2, "pp": 2},
        {"workload": "reward", "data_parallel": "dp"},
    ],
)
def test_meshes_that_are_not_priced_say_the_way_out(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"leave --|use --") as told:
        priced("", gpus=4, **options)
    assert "\n" not in str(told.value) and options["workload"] in str(told.value)


MIXTURE = read_config(
    {
        "model_type": "mixtral",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "vocab_size": 5000,
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
)


@pytest.mark.parametrize(
    "axis",
    ["tp", "cp", "ep"],
)
def test_a_reference_crosses_the_mesh_as_the_policy_does(axis: str) -> None:
    """As many collectives of the axis in its forward as in the policy's."""
    given = {"workload": "dpo", "gpus": 2, axis: 2, "bs": 2, "ctx": 256, "precision": "bf16"}
    e = estimate(MIXTURE if axis == "ep" else SPEC, train_config(given), hardware="a100-80")
    names = {"tp": "tensor", "cp": "context", "ep": "expert"}
    counts = {True: 0, False: 0}
    for _, segments in e.step.micro_steps:
        for s in segments:
            if s.phase is not Phase.FORWARD:
                continue
            for action, payload in s.events:
                for cost in payload.costs if action == RUN and isinstance(payload, Work) else ():
                    if isinstance(cost, Collective) and cost.axis == names[axis]:
                        counts[s.name.startswith("reference")] += s.repeat
    assert counts[True] == counts[False] > 0


def test_rollouts_in_a_pipeline_are_each_stages_first_phase() -> None:
    given = {"workload": "grpo", "reference": False, "rollout": "vllm", "pp": 2, "gpus": 4}
    sizes = {"bs": 1, "ctx": 256, "grad_accum": 4, "rollout_memory": 0.1}
    e = estimate(SPEC, train_config({**given, **sizes}), hardware="a100-80")
    alone_given = {"pp": 2, "gpus": 4, "bs": 1, "ctx": 256, "grad_accum": 4}
    plain = estimate(SPEC, train_config(alone_given), hardware="a100-80")
    sent: list[int] = []
    for rank in (0, 1):
        step, alone = e.ranks.step(rank), plain.ranks.step(rank)
        first = step.micro_steps[0][1][0]
        assert first.phase is Phase.ROLLOUT
        sent.append(sum("to the engine" in s.name for s in step.micro_steps[0][1]))
        assert len(step.runs) == len(alone.runs)
    assert min(sent) >= 2  # its own layers, and what the stage has besides


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_pipeline_runs_what_is_beside_the_policy_before_it(method: str) -> None:
    """Each forward over all micro-batches, then the critic's, then the policy's; a copy of the
    reference goes to the host between steps, and comes once for all of them."""
    there = {"reference_at": "offload"} if method == "full" else {}
    given = {"workload": "ppo", "rollout": "vllm", "rollout_memory": 0.1, "pp": 2, "gpus": 4}
    sizes = {"bs": 1, "ctx": 256, "grad_accum": 4, "method": method, **there}
    e = estimate(SPEC, train_config({**given, **sizes}), hardware="a100-80")
    order: dict[str, int] = {}
    for times, row in e.ranks.step(1).micro_steps:
        names = [s.name for s in row]
        for what in ("log-probabilities", "to the device", "reference: model", "dropped", "values"):
            if any(what in name for name in names):
                order[what] = order.get(what, 0) + times
        for what in ("ScoreHead", "CausalLmHead"):
            if what in names:
                order[what] = order.get(what, 0) + times
    swapped = method == "full"
    expected = {
        "log-probabilities": 4,
        **({"to the device": 1} if swapped else {}),
        "reference: model": 4,
        **({"dropped": 1} if swapped else {}),
        **{"values": 4, "ScoreHead": 4, "CausalLmHead": 4},
    }
    assert list(order.items()) == list(expected.items())


def test_weights_of_tensor_ranks_are_whole_on_their_way() -> None:
    given = {"workload": "grpo", "reference": False, "rollout": "vllm", "gpus": 2, "tp": 2}
    e = estimate(SPEC, train_config({**given, "bs": 1, "ctx": 256}), hardware="a100-80")
    whole = {t.nbytes for t in e.timeline.tensors if "on its way" in t.name}
    assert max(whole) == 2 * 5000 * 256 and 2 * 256 * 704 in whole


def test_a_preference_step_under_tensor_parallelism_splits_its_reference() -> None:
    e = priced("", workload="dpo", tp=2, gpus=2)
    assert stored(e) == pytest.approx(2 * PARAMETERS / 2, rel=0.01)


def test_verls_ppo_shards_its_reference() -> None:
    """TRL's PPO wraps it in nothing; verl's workers are all FSDP's (workers/fsdp_workers.py)."""
    same = {"workload": "ppo", "rollout": "none", "ctx": 64}
    by = {
        (trainer, at): priced(
            "fsdp1", **same, rollout_trainer=trainer, reference_at=at
        ).memory.requested
        for trainer in ("verl", "trl")
        for at in ("auto", "whole")
    }
    assert (
        by["verl", "whole"] - by["verl", "auto"] > PARAMETERS
    )  # half of two bytes each, of two ranks
    assert by["trl", "whole"] == by["trl", "auto"]
