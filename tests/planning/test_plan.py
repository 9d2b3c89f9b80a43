"""`estimate plan`: equal to exhaustive search on random small spaces; limits verified one step
beyond."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shlex
from itertools import pairwise, product
from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.base.units import MIB
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.cluster import Cluster
from napkinmath.config.hardware import Hardware
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import Estimate, Verdict, estimate
from napkinmath.inputs.options import train_config
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.models.families import read_config
from napkinmath.models.read import read_model
from napkinmath.planning.meshes import meshes, price_mesh
from napkinmath.planning.plan import plan
from napkinmath.planning.search import largest_batch, longest_context
from napkinmath.planning.space import SAME_SPEED, Goal, Machine, Space, pointless
from napkinmath.planning.sweep import Sweeper
from napkinmath.report.plan_plot import pareto
from napkinmath.serving.plans import planned
from napkinmath.timing.efficiency import Efficiency, default_efficiency

KNOBS: dict[str, tuple[object, ...]] = {
    "method": ("full", "lora", "qlora"),
    "checkpointing": (None, "none", "full"),
    "optimizer": (None, "adamw-8bit", "sgd", "adafactor"),
    "loss": (None, "chunked"),
    "optimizer_in_backward": (None, True),
    "precision": (None, "bf16", "bf16-amp"),
    "attention": (None, "eager"),
}


SPEC = read_config(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "vocab_size": 8000,
        "num_hidden_layers": 2,
    }
)


def random_space(seed: int) -> tuple[Space, Goal]:
    """A tiny model on GPUs cut down so that some of a few combinations fit; sizes and GPUs recur
    over seeds, memory and prices do not."""
    draw = random.Random(seed)
    goal = draw.choice(list(Goal))
    machines = tuple(
        Machine(
            hardware=find_hardware(
                name, vram=find_hardware(name).context_bytes + draw.randint(250, 1100) * MIB
            ),
            price_per_hour=draw.uniform(0.2, 4),
        )
        for name in draw.sample(("rtx4090", "a100-80", "t4"), draw.choice((1, 1, 2)))
    )
    names = draw.sample(list(KNOBS), 2)
    knobs = tuple(
        (
            name,
            tuple(
                dict.fromkeys((KNOBS[name][0], *draw.sample(KNOBS[name], min(2, len(KNOBS[name])))))
            ),
        )
        for name in names
    )
    space = Space(
        spec=SPEC,
        machines=machines,
        base=() if "method" in names else (("method", draw.choice(("full", "lora"))),),
        knobs=knobs,
        batches=tuple(draw.sample((1, 3, 8), 2)),
        lengths=tuple(sorted(draw.sample((500, 2000), draw.choice((1, 1, 2))))),
    )
    return space, goal


def key_of(
    space: Space, goal: Goal, config_changes: int, machine: Machine, e: Estimate, b: int, s: int
) -> tuple[float, ...]:
    """What the goal sorts by, from the scalar estimate: smaller is better."""
    speed = e.time.tokens_per_s if e.time is not None else 0.0
    changes = config_changes + (b != space.batches[0])

    def step(value: float) -> float:
        return -math.floor(math.log(max(value, 1e-9)) / math.log1p(SAME_SPEED))

    if goal is Goal.TOKENS:
        return step(speed), changes, e.peak.nbytes
    if goal is Goal.CHEAPEST:
        return step(speed / (machine.price_per_hour or 1)), changes, e.peak.nbytes
    if goal is Goal.FEWEST_CHANGES:
        return changes, step(speed), e.peak.nbytes
    return (-s if goal is Goal.CONTEXT else -b), step(speed), changes, e.peak.nbytes


def priced(
    config: TrainConfig,
    hardware: Hardware,
    _known: dict[object, Estimate] = {},  # noqa: B006
) -> Estimate:
    """The scalar estimate on a GPU cut down to some memory, which changes neither its operations
    nor their seconds."""
    key = config, hardware.gpu.name
    if key not in _known:
        _known[key] = estimate(SPEC, config, hardware=hardware.gpu)
    e = _known[key]
    cut = Estimate(
        e.ranks, config, e.step, e.timeline, hardware=hardware, speed=e.speed, settings=e.settings
    )
    cut.replays = e.replays  # with all the memory it wants
    return cut


def exhaustive(space: Space, goal: Goal) -> tuple[float, ...] | None:
    """The best key over every combination, each through `estimate` and its verdict."""
    best: tuple[float, ...] | None = None
    seen: set[object] = set()
    names = [name for name, _ in space.knobs]
    for machine in space.machines:
        for values in product(*(values for _, values in space.knobs)):
            options = {
                **dict(space.base),
                **{n: v for n, v in zip(names, values, strict=True) if v is not None},
            }
            if options.get("optimizer_in_backward"):
                options.setdefault("clip", False)
            bf16 = machine.hardware.gpu.supports("bf16")
            try:
                config = train_config(options)
            except InputError:
                continue
            if pointless(options, dict(space.base)) or config in seen or not bf16:
                continue
            seen.add((machine.hardware.gpu.name, config))
            changes = sum(v != known[0] for v, (_, known) in zip(values, space.knobs, strict=True))
            for b, s in product(space.batches, space.lengths):
                e = priced(config.replace(micro_batch_size=b, sequence_length=s), machine.hardware)
                if e.verdict is Verdict.FITS:
                    key = key_of(space, goal, changes, machine, e, b, s)
                    best = key if best is None or key < best else best
    return best


@pytest.mark.slow
def test_plan_is_the_exhaustive_answer_on_200_random_spaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a combination costs does not depend on the machine's memory, so each is recorded once
    for all spaces that have it."""
    known: dict[object, Sweeper] = {}

    def recorded_once(
        spec: ModelSpec, config: TrainConfig, hardware: Hardware, speed: Efficiency | None
    ) -> Sweeper:
        return known.setdefault((config, hardware.gpu.name), Sweeper(spec, config, hardware, speed))

    monkeypatch.setattr("napkinmath.planning.space.Sweeper", recorded_once)
    answered = refused = 0
    for seed in range(200):
        space, goal = random_space(seed)
        found = plan(space, goal, top=1)
        best = exhaustive(space, goal)
        if best is None:
            assert not found.best, seed
            refused += 1
            continue
        answered += 1
        first = found.best[0]
        options = dict(first.options)
        changes = len([change for change in first.changes if not change.startswith("--bs ")])
        own = key_of(
            space,
            goal,
            changes,
            first.machine,
            first.estimate,
            int(str(options["bs"])),
            int(str(options["ctx"])),
        )
        assert own == best, (seed, goal, first.options)
        assert first.estimate.verdict is Verdict.FITS
    assert answered > 120 and refused > 5


def test_ranks_count_as_changes_and_are_searched() -> None:
    space = Space(
        spec=read_config(
            {
                "model_type": "llama",
                "hidden_size": 128,
                "num_attention_heads": 4,
                "intermediate_size": 256,
                "vocab_size": 500,
                "num_hidden_layers": 2,
            }
        ),
        machines=(Machine(hardware=find_hardware("l4")),),
        base=(("method", "lora"),),
        knobs=(),
        ranks=(64, 8),
    )
    assert dict(plan(space, Goal.FEWEST_CHANGES, top=1).best[0].options)["rank"] == 64


@pytest.mark.slow
def test_limits_fit_and_one_step_more_does_not() -> None:
    e = estimate(
        "llama-3.2-1b",
        train_config({"method": "lora", "checkpointing": "full"}),
        hardware="rtx3060-12",
    )
    for limit, size in (
        (largest_batch(e), "micro_batch_size"),
        (longest_context(e), "sequence_length"),
    ):
        assert 1 < limit.fits <= limit.may_fit
        for value, fits in ((limit.fits, True), (limit.fits + 1, False)):
            assert (
                estimate(e.spec, e.config.replace(**{size: value}), hardware=e.hardware).verdict
                is Verdict.FITS
            ) is fits
        beyond = estimate(
            e.spec, e.config.replace(**{size: limit.may_fit + 1}), hardware=e.hardware
        )
        assert beyond.verdict is Verdict.DOES_NOT_FIT


@pytest.mark.slow
def test_command_prints_a_row_that_estimates_the_same() -> None:
    done = run(
        "plan",
        "--model",
        "llama-3.2-1b",
        "--gpu",
        "rtx3060-12",
        "--ctx",
        "1k",
        "--price",
        "0.3",
        "--json",
        "--bs",
        "1,2,4,8",
    )
    assert done.code == 0
    found = json.loads(done.out)
    row = found["best"][0]
    flags: list[str] = []
    for key, value in row["options"].items():
        name = key.replace("_", "-")
        flags += (
            [f"--{name}" if value else f"--no-{name}"]
            if isinstance(value, bool)
            else [f"--{name}", str(value)]
        )
    again = run("sweep", "--model", "llama-3.2-1b", *flags, "--gpu", "rtx3060-12")
    figures = dict(zip(*(line.split("\t") for line in again.out.splitlines()), strict=True))
    assert figures["verdict"] == "fits"
    assert float(figures["tokens/s"].replace(",", "")) == pytest.approx(
        row["tokens_per_s"], abs=0.51
    )
    assert row["price"] == pytest.approx(0.3 * row["hours"]) and row["hours"] == pytest.approx(
        1e9 / row["tokens_per_s"] / 3600
    )
    speeds = [r["tokens_per_s"] for r in found["best"]]
    assert all(a >= b * (1 - SAME_SPEED) for a, b in pairwise(speeds))


def test_trades_are_the_plan_with_one_knob_put_back() -> None:
    done = run(
        "plan",
        "--model",
        "llama-3.2-1b",
        "--lora",
        "--gpu",
        "rtx3060-12",
        "--ctx",
        "2k",
        "--json",
        "--top",
        "1",
    )
    found = json.loads(done.out)
    back = {t["flag"].split()[0]: t for t in found["trades"]}
    assert back and all(t["saved_bytes"] != 0 or t["speed_ratio"] for t in found["trades"])
    for flag, trade in back.items():
        options = {
            key: value
            for key, value in found["best"][0]["options"].items()
            if key != flag.lstrip("-").replace("-", "_")
        }
        options.setdefault("bs", 1)
        without = estimate("llama-3.2-1b", train_config(options), hardware="rtx3060-12")
        assert trade["saved_bytes"] == without.peak.nbytes - found["best"][0]["requested_bytes"]


def test_cheapest_needs_prices_and_names_them() -> None:
    argv = (
        "plan",
        "--model",
        "gpt2",
        "--full",
        "--goal",
        "cheapest",
        "--gpu",
        "l4",
        "--gpu",
        "a100-80",
        "--checkpointing",
        "none",
        "--precision",
        "bf16",
        "--optimizer",
        "sgd",
    )
    assert run(*argv).code == 2
    assert run(*argv, "--price", "H100=2").code == 2
    cheap = run(*argv, "--price", "l4=0.01", "--price", "a100-80=100", "--json", "--top", "1")
    dear = run(*argv, "--price", "l4=100", "--price", "a100-80=0.01", "--json", "--top", "1")
    assert json.loads(cheap.out)["best"][0]["gpu"].startswith("L4") and json.loads(dear.out)[
        "best"
    ][0]["gpu"].startswith("A100")


@pytest.mark.slow
def test_nothing_fits_is_exit_code_1() -> None:
    done = run("plan", "--model", "llama-2-70b", "--full", "--gpu", "t4")
    assert done.code == 1 and "nothing fits" in done.out
    assert run("plan", "--model", "gpt2").code == 2


@pytest.mark.slow
def test_experts_are_packed_where_a_model_has_them() -> None:
    """Unpacked they stay in 16 bits or more: 168 GiB of Mixtral's, on a GPU of 48."""
    given = "--qlora --bs 1 --checkpointing full --precision bf16-autocast --loss hf --kernels hf"
    command = f"plan --gpu a6000 {given} --optimizer adamw-fused --json --model"
    of_experts, dense = (
        json.loads(run(*command.split(), name).out) for name in ("mixtral-8x7b", "llama-7b")
    )
    assert of_experts["best"][0]["options"]["quantize_experts"] is True
    assert of_experts["num_candidates"] == 2 * dense["num_candidates"]


def test_limits_on_the_command_line() -> None:
    done = run(
        "plan", "--model", "llama-3.2-1b", "--lora", "--gpu", "rtx3060-12", "--max-bs", "--max-ctx"
    )
    assert done.code == 0 and done.out.count("RTX 3060") == 2
    assert run("plan", "--model", "llama-2-70b", "--lora", "--gpu", "t4", "--max-bs").code == 1


def test_pareto_points_are_beaten_by_none() -> None:
    draw = random.Random(0)
    points = [(draw.random(), draw.random()) for _ in range(300)]
    line = pareto(points)
    for m, v in points:
        beaten = any(x <= m and y >= v and (x, y) != (m, v) for x, y in points)
        assert ((m, v) in line) is not beaten


@pytest.mark.slow
def test_plot_is_written_and_names_the_best(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    assert (
        run(
            "plan", "--model", "gpt2", "--lora", "--gpu", "t4", "--ctx", "512", "--plot", str(file)
        ).code
        == 0
    )
    assert (
        "--precision fp16-autocast --bs" in file.read_text()
        and "GiB at the peak" in file.read_text()
    )
    assert (
        run(
            "plan", "--model", "gpt2", "--lora", "--gpu", "t4", "--ctx", "512", "--plot", str(file)
        ).code
        == 2
    )


@pytest.mark.slow
def test_meshes_of_several_gpus_are_ranked_and_fit() -> None:
    """The first row is the fastest that a plain search over the same meshes finds; a mesh's own
    flags give the same estimate."""
    argv = (
        "plan",
        "--model",
        "llama-3.2-1b",
        "--lora",
        "--bs",
        "2",
        "--checkpointing",
        "full",
        "--gpus",
        "4xL4",
        "--ctx",
        "2k",
        "--price",
        "0.5",
    )
    found = json.loads(run(*argv, "--json").out)
    speeds = [row["tokens_per_s"] for row in found]
    assert found and speeds == sorted(speeds, reverse=True)
    cluster = Cluster(hardware=find_hardware("l4"), gpus_per_node=4)
    speed = default_efficiency(cluster.hardware.gpu)
    every: list[float] = []
    for kind in ("ddp", "zero1", "zero3", "fsdp2"):
        base = train_config(
            {
                "method": "lora",
                "bs": 2,
                "ctx": "2k",
                "checkpointing": "full",
                "gpus": "4",
                "data_parallel": kind,
            }
        )
        for config in meshes(read_model("llama-3.2-1b"), cluster, base):
            with contextlib.suppress(InputError):  # not every strategy is priced within a pipeline
                if estimate("llama-3.2-1b", config, hardware=cluster).verdict is Verdict.FITS:
                    every.append(
                        price_mesh(read_model("llama-3.2-1b"), config, cluster, speed).tokens_per_s
                    )
    assert speeds[0] == pytest.approx(max(every), rel=1e-9)
    assert found[0]["price"] == pytest.approx(0.5 * 4 * found[0]["hours"])
    table = run(*argv)
    assert table.code == 0 and "--gpus 4" in table.out and "money" in table.out
    assert run("plan", "--model", "llama-3.1-405b", "--full", "--gpus", "2xT4").code == 1
    assert run("plan", "--model", "gpt2", "--gpus", "2xL4", "--goal", "context").code == 2


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ("roberta-base --lora", 512),
        ("roberta-base --lora --ctx 128", 128),
        ("whisper-small --lora", 448),
        ("wav2vec2-base-960h --full", 999),
        ("wav2vec2-base-960h --full --audio 10", 499),
        ("vit-base --full", 197),
        ("vit-base --full --ctx 2048", 197),
        ("vit-base --full --image 384x384", 577),
    ],
)
def test_a_plan_takes_the_context_that_an_estimate_takes(options: str, length: int) -> None:
    fixed = "--gpu h100 --bs 2 --checkpointing none --optimizer adamw --kernels hf --loss hf"
    words = f"--model {options} {fixed} --precision bf16-amp --no-optimizer-in-backward".split()
    found = run("plan", *words, "--json")
    assert found.code == 0, found.err
    best = json.loads(found.out)["best"][0]
    own = run("--json", *words)
    assert own.code == 0, own.err
    priced_alone = json.loads(own.out)
    assert best["options"]["ctx"] == length
    assert best["requested_bytes"] == priced_alone["peak"]["nbytes"]
    assert best["tokens_per_s"] == pytest.approx(priced_alone["time"]["tokens_per_s"])


def test_lengths_given_have_a_largest_batch_and_no_longest_context() -> None:
    words = ("plan", "--arch", "L2 h64 a4 kv2 f128 v256", "--gpu", "T4", "--lengths", "64,32,7")
    asked = run(*words, "--max-bs")
    assert asked.code == 0 and "on T4 at the lengths given: " in asked.out
    for more in ("--max-ctx", "--goal context"):
        refused = run(*words, *more.split())
        assert refused.code == 2 and "--lengths says how long sequences are" in refused.err


def test_no_context_is_searched_for_images_or_beyond_learned_positions() -> None:
    for words in ("--goal context", "--max-ctx"):
        refused = run("plan", "--model", "resnet-50", "--gpu", "h100", *words.split())
        assert refused.code == 2 and "reads images" in refused.err
    words = [
        "plan",
        "--model",
        "roberta-base",
        "--lora",
        "--gpu",
        "h100",
        "--goal",
        "context",
        "--json",
    ]
    assert json.loads(run(*words).out)["best"][0]["options"]["ctx"] == 512


@pytest.mark.parametrize("model", ["vit-base", "resnet-50"])
def test_a_plan_of_images_on_several_gpus_says_images_and_what_can_be_run(model: str) -> None:
    """A model of convolutions alone has a mesh too, and no context is printed."""
    plan = run("plan", "--model", model, "--lora", "--bs", "8", "--gpus", "2xrtx3060")
    assert plan.code == 0 and "images/s" in plan.out and "--ctx" not in plan.out
    line = next(line for line in plan.out.splitlines() if line.startswith("run it:"))
    own = run(*shlex.split(line.partition("estimate ")[2]), "--json")
    assert own.code == 0 and not json.loads(own.out).get("notes")
    rows = json.loads(
        run(
            *shlex.split(f"plan --model {model} --lora --bs 8"), "--gpus", "2xrtx3060", "--json"
        ).out
    )
    per_image = rows[0]["tokens_per_s"] / rows[0]["options"]["ctx"]
    assert f"{per_image:,.0f}" in plan.out


@pytest.mark.slow
def test_where_nothing_fits_other_kernels_come_before_host_memory_at_every_door() -> None:
    asked = {"model": "mistral-small-24b", "gpu": "rtx4090", "ctx": 4096}
    done = run(
        "plan", "--model", "mistral-small-24b", "--gpu", "rtx4090", "--ctx", "4096", "--json"
    )
    told, shown = json.loads(done.out)["best"], planned(asked)
    assert told and all(row["options"]["kernels"] == "unsloth" for row in told)
    assert shown["best"][0]["options"]["kernels"] == "unsloth" and len(shown["notes"]) == 1
    assert not any("offload" in row["options"] for row in told)
    # what has no adapters is not patched: host memory is searched, on the page too
    shown = planned({**asked, "method": "full", "model": "qwen3-8b"})
    assert all("offload" in row["options"] for row in shown["best"]) and len(shown["notes"]) == 1
