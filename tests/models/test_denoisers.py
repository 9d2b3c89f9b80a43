"""Denoisers of diffusers: every figure against what a trace of its classes gave
(benchmarks/accuracy/denoisers.py --record), published figures, and what the command says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from denoisers import priced, spec_of
from napkinmath.answers.figures import Verdict
from napkinmath.answers.ranges import headroom_bytes
from napkinmath.base.errors import InputError
from napkinmath.catalog.models import load_rows
from napkinmath.catalog.stacks import STACKS
from napkinmath.cli.main import main
from napkinmath.config.train_config import (
    AdapterConfig,
    Batch,
    OffloadConfig,
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.inputs.jobs import priced as priced_jobs
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.swapped_blocks import most_swapped, with_swapped
from napkinmath.memory.simulate import simulate
from napkinmath.models.read import read_model

RECORDED = json.loads((Path(__file__).parent / "denoisers_traced.json").read_text())
CLASSES = (
    *("UNet2DConditionModel", "FluxTransformer2DModel", "SD3Transformer2DModel"),
    *("WanTransformer3DModel", "QwenImageTransformer2DModel"),
)
TOLERANCE = 5e-4  # of the peak: small tables that a forward makes and drops are left out
DENOISERS = [row for row in load_rows() if row["class"] in CLASSES]
GB = 1e9
# (options, GB, share that it may be off): device memory that a driver's monitor shows.
# huggingface.co/blog/flux-qlora (June 2025): FLUX.1-dev, rank 4, 512 x 768, batch 1, checkpointing,
# 8-bit AdamW, cached latents and embeddings: about 9 GB with NF4, about 26 GB with bf16 weights.
PUBLISHED = (
    ({"method": "qlora"}, 9.0, 0.06),
    ({"method": "lora"}, 26.0, 0.06),
)


@pytest.mark.parametrize(
    "case", RECORDED["cases"], ids=lambda c: f"{c['model']}-{c['method']}-{c['size'][0]}"
)
def test_peaks_and_parameters_are_those_of_a_trace(case: dict[str, Any]) -> None:
    found = priced(case)
    assert found["trained"] == case["trained"]
    assert found["peak"] == pytest.approx(case["peak"], rel=TOLERANCE)


@pytest.mark.parametrize("row", DENOISERS, ids=lambda row: row["name"])
def test_parameters_are_those_that_the_catalog_says(row: dict[str, Any]) -> None:
    (e,) = priced_jobs({"model": row["name"], "method": "full"}, [])
    assert e.num_parameters == row["parameters"]


@pytest.mark.parametrize(
    ("name", "most"), [("flux.1-dev", 7), ("qwen-image", 5), ("sd3.5-medium", 7)]
)
def test_equal_blocks_of_two_streams_are_recorded_once(name: str, most: int) -> None:
    """Entrance, head, the last block; of each kind the first, whose inputs are frozen, and all
    others."""
    spec = read_model(name)
    assert spec.canvas is not None
    config = TrainConfig(adapter=AdapterConfig(targets=spec.canvas.targets))
    step = build_step(spec, Policy(config, stack=STACKS["diffusers"]))
    assert sum(run.count for run in step.runs if run.stage.checkpointed) == spec.num_layers
    assert len({id(run.block) for run in step.runs}) <= most


@pytest.mark.parametrize(
    "name", ["sdxl", "sd3.5-medium", "flux.1-dev", "wan2.1-t2v-1.3b", "qwen-image"]
)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("again", [False, True])
def test_what_is_freed_or_handed_on_is_there(name: str, method: str, again: bool) -> None:
    """Gradients that are slices of a larger one change their size only where that is said."""
    spec = read_model(name)
    assert spec.canvas is not None
    config = TrainConfig(
        precision=Precision.BF16_AUTOCAST,
        adapter=AdapterConfig(targets=spec.canvas.targets) if method == "lora" else None,
        recompute=RecomputeConfig(kind=RecomputeKind.FULL if again else RecomputeKind.NONE),
        batch=Batch(image_size=(512, 512)),
        optimizer="adamw-foreach",
    )
    timeline = simulate(build_step(spec, Policy(config, STACKS["diffusers"])), steps=2)
    held: Counter[int] = Counter()
    for segment in timeline.segments:
        for _ in range(segment.repeat):
            for action, index in segment.events:
                if action == "=":
                    old, new = segment.pairs[index]
                    sizes = timeline.tensors[old].requested, timeline.tensors[new].requested
                    assert sizes[0] == sizes[1]
                    held[old] -= 1
                    held[new] += 1
                    assert held[old] >= 0
                else:
                    held[index] += 1 if action == "+" else -1
                    assert held[index] >= 0


@pytest.mark.parametrize("targets", ["to_add_out", "txt_mlp.net.2"])
def test_a_block_whose_second_result_alone_is_trained_runs_again(targets: str) -> None:
    asked = {"model": "qwen-image", "method": "lora", "image": "512x512", "targets": targets}
    again, kept = (
        priced_jobs({**asked, "checkpointing": kind}, [])[0].memory.allocated.value
        for kind in ("full", "none")
    )
    assert again < kept


@pytest.mark.parametrize(("options", "published", "share"), PUBLISHED)
def test_published_figures(options: dict[str, object], published: float, share: float) -> None:
    (e,) = priced_jobs(
        {
            "model": "flux.1-dev",
            "image": "512x768",
            "rank": 4,
            "checkpointing": "full",
            "optimizer": "adamw-8bit",
            "targets": "to_k,to_q,to_v,to_out.0",
            "gpu": ["h100"],
            **options,
        },
        [],
    )
    assert e.memory.device.value / GB == pytest.approx(published, rel=share)


def test_sizes_of_pictures_move_the_answer() -> None:
    peaks = [
        priced_jobs({"model": "sdxl", "method": "lora", "image": image}, [])[0].peak.nbytes
        for image in ("512", "1024", "1024x1536")
    ]
    assert peaks == sorted(peaks) and len(set(peaks)) == len(peaks)
    own, given = (
        priced_jobs({"model": "sdxl", "method": "lora", **image}, [])[0].peak.nbytes
        for image in ({}, {"image": "1024x1024"})
    )
    assert own == given


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sdxl --lora --image 1000", "use 992"),
        ("sd3-medium --lora --image 4096", "positions for 3072 pixels"),
        ("sdxl --lora --ctx 77", "--ctx '77' has no meaning for sdxl"),
        ("sdxl --lora --images 2", "--images '2' has no meaning"),
        ("sdxl --lora --tp 2 --gpus 2xh100", "model parallelism"),
        ("sdxl --lora --fsdp --gpus 2xh100", "FSDP and ZeRO"),
        ("sdxl --lora --checkpointing every:2", "partial checkpointing"),
        ("sdxl --lora --attention eager", "other attention than SDPA"),
        ("sdxl --lora --stack hf", "use --stack diffusers"),
        ("sdxl --task causal-lm", "leave --task out"),
        ("sdxl --lora --compile", "--compile"),
        ("sdxl --full --precision bf16-fp8-base", "weights that are in FP8; use --lora"),
        ("llama-7b --lora --precision bf16-fp8-base", "use --quant fp8"),
        ("plan sdxl --gpu rtx4090", "estimate sweep sdxl"),
        ("hunyuanvideo --lora", "makes pictures by diffusion"),
        ("wan2.1-t2v-14b --lora --frames 80", "use 77"),
        ("sdxl --lora --frames 5", "this model makes pictures; leave it out"),
        ("llama-7b --lora --frames 5", "--frames '5' is for denoisers"),
        ("llama-7b --lora --blocks-to-swap 5", "--blocks-to-swap '5' is for denoisers"),
        ("wan2.1-t2v-14b --lora --blocks-to-swap 40", "use 39 or fewer"),
        ("flux.1-dev --lora --blocks-to-swap 38", "use 35 or fewer"),
        ("sdxl --lora --blocks-to-swap 3", "no trainer swaps blocks of sdxl"),
        ("qwen-image --full --blocks-to-swap 3", "trained whole and swapped; use --lora"),
    ],
)
def test_what_has_no_rules_is_one_line(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert says in err[-1]


@pytest.mark.parametrize(
    ("model", "swapped", "blocks"),
    [("wan2.1-t2v-1.3b", 10, 10), ("flux.1-dev", 9, 4 + 10), ("qwen-image", 45, 45)],
)
def test_swapped_blocks_leave_their_linears_on_the_host(
    model: str, swapped: int, blocks: int
) -> None:
    """Adapters, biases and norms stay, and so much is copied forward and backward as is swapped."""
    asked = {"model": model, "method": "lora", "checkpointing": "full", "image": "512x512"}
    (whole,) = priced_jobs({**asked, "gpu": ["rtx4090"]}, [])
    (less,) = priced_jobs({**asked, "gpu": ["rtx4090"], "blocks_to_swap": swapped}, [])
    gone = whole.peak.nbytes - less.peak.nbytes
    assert gone > 0 and less.host_bytes == gone
    runs = [run for run in less.step.runs if run.stage.swapped]
    assert sum(run.count for run in runs) == blocks
    assert less.num_parameters == whole.num_parameters
    assert less.num_trained == whole.num_trained
    assert whole.time is not None and less.time is not None
    assert less.time.seconds >= whole.time.seconds


@pytest.mark.slow
def test_blocks_are_swapped_where_nothing_less_is_enough() -> None:
    """As many as it takes: with one fewer it is not sure to fit."""
    asked = {"model": "wan2.1-t2v-14b", "method": "lora", "gpu": ["rtx3060"]}
    asked |= {"frames": 17, "image": "480x480"}
    (e,) = priced_jobs(asked, [])
    found = e.remedy
    assert found is not None and found.flags[:-1] == ("--checkpointing full",)
    name, count = found.flags[-1].split()
    assert name == "--blocks-to-swap" and int(count) > 1
    asked |= {"checkpointing": "full"}
    (fits,) = priced_jobs({**asked, "blocks_to_swap": int(count)}, [])
    (fewer,) = priced_jobs({**asked, "blocks_to_swap": int(count) - 1}, [])
    assert fits.verdict is Verdict.FITS and fewer.verdict is not Verdict.FITS
    assert headroom_bytes(fits) == found.headroom_bytes


@pytest.mark.parametrize("model", ["wan2.1-t2v-1.3b", "flux.1-dev", "qwen-image"])
def test_blocks_are_swapped_anew_under_another_number(model: str) -> None:
    spec = read_model(model)
    config = TrainConfig(adapter=AdapterConfig(), offload=OffloadConfig())
    canvas = spec.canvas
    assert canvas is not None
    most = most_swapped(spec, canvas)

    def swapped(of: ModelSpec, count: int) -> ModelSpec:
        return with_swapped(
            of, canvas, config.replace(offload=config.offload.replace(blocks=count))
        )

    assert most > 2 and swapped(swapped(spec, most), 2) == swapped(spec, 2) != spec
    assert swapped(swapped(spec, 2), 0) == spec
    with pytest.raises(InputError, match=f"use {most} or fewer"):
        swapped(spec, most + 1)


def test_frames_move_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"model": "wan2.1-t2v-1.3b", "method": "lora", "image": "480x480"}
    peaks = [priced_jobs({**asked, "frames": n}, [])[0].peak.nbytes for n in (1, 17, 33)]
    assert peaks == sorted(peaks) and len(set(peaks)) == len(peaks)
    own, given = (priced_jobs({**asked, **n}, [])[0].peak.nbytes for n in ({}, {"frames": 81}))
    assert own == given
    assert main(["wan2.1-t2v-1.3b", "--lora", "--frames", "33", "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    assert "batch 1 video" in out and "videos/s" in out
    assert "videos of 33 frames of 832x480" in out and "latents of 9x104x60" in " ".join(
        out.split()
    )


def test_the_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["flux.1-dev", "--lora", "--image", "1024x1024", "--bs", "1", "--gpu", "rtx4090"]) == 1
    )
    out, err = capsys.readouterr()
    assert "weights of the layers      22.05" in out and "norms 6.05" not in out
    assert "batch 1 image" in out and "images/s" in out and "tokens/s" not in out
    assert "latents of 128x128 and 512 tokens of text" in out
    assert "--targets attn.to_k" in err
    assert main(["sdxl", "--full", "--image", "1024", "--bs", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["name"] == "sdxl"


def test_a_config_of_diffusers_is_read_by_its_class(tmp_path: Path) -> None:
    case = RECORDED["cases"][0]
    row = next(row for row in DENOISERS if row["name"] == case["model"])
    fields = {**row["config"], "_class_name": row["config"]["model_type"]}
    del fields["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    read = read_model(tmp_path)
    assert read.stages == spec_of(case).stages
