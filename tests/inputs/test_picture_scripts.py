"""Launch lines and files of trainers of pictures: diffusers' examples and sd-scripts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError
from napkinmath.base.units import GIB
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

_XL = "--pretrained_model_name_or_path=stabilityai/stable-diffusion-xl-base-1.0"
_FLUX = "--pretrained_model_name_or_path black-forest-labs/FLUX.1-dev"
_OLD = "--pretrained_model_name_or_path CompVis/stable-diffusion-v1-4"
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]
LINES: list[tuple[str, dict[str, Any]]] = [
    (
        f"accelerate launch --mixed_precision=bf16 train_dreambooth_lora_flux.py {_FLUX} --rank 16"
        " --resolution 768 --train_batch_size 2 --use_8bit_adam --cache_latents"
        " --lora_layers 'attn.to_k,attn.to_q' --gradient_checkpointing",
        {"model": "flux.1-dev", "method": "lora", "rank": 16, "image": "768x768", "bs": 2}
        | {"optimizer": "adamw-8bit", "targets": ["attn.to_k", "attn.to_q"], "resident": None}
        | {"precision": "bf16-autocast", "checkpointing": "full", "clip": True},
    ),
    (  # no size, rank, batch or precision is said
        f"accelerate launch train_text_to_image_lora_sdxl.py {_XL}",
        {"rank": 4, "image": "1024x1024", "bs": 16, "precision": "fp32", "checkpointing": "none"}
        | {"resident": ["text-encoders", "vae-fp32"]},
    ),
    (
        f"accelerate launch --num_processes 2 train_text_to_image.py {_OLD} --use_ema"
        " --mixed_precision fp16 --max_grad_norm 0",
        {"model": "sd-1.5", "method": "full", "precision": "fp16-amp", "clip": False, "gpus": 2}
        | {"resident": ["text-encoders", "vae", "ema"]},
    ),
    (  # class pictures stand beside the instance's in each batch
        f"accelerate launch train_dreambooth.py {_OLD} --with_prior_preservation"
        " --train_batch_size 1 --pre_compute_text_embeddings",
        {"bs": 2, "resident": ["vae"], "image": "512x512"},
    ),
    (
        f"accelerate launch train_dreambooth_lora_flux_miniature.py {_FLUX} --mixed_precision fp16"
        " --cache_latents --train_batch_size 1 --resolution 1024",
        {"quant": "nf4", "method": "lora", "precision": "fp16-autocast", "resident": None},
    ),
    (  # text encoders are dropped before the first step, the autoencoder waits on the host
        "accelerate launch train_dreambooth_lora_qwen_image.py --pretrained_model_name_or_path"
        " Qwen/Qwen-Image --mixed_precision bf16 --offload --rank 8 --train_batch_size 1",
        {"model": "qwen-image", "rank": 8, "bs": 1, "image": "512x512", "resident": None},
    ),
    (  # a checkpoint that only its script says the kind of
        "accelerate launch sdxl_train_network.py --pretrained_model_name_or_path animagine.safetensors"
        " --network_module networks.lora --network_dim 8 --network_train_unet_only --sdpa"
        " --optimizer_type AdamW8bit --mixed_precision bf16 --resolution 1024,768",
        {"model": "sdxl", "rank": 8, "adapter_dtype": "fp32", "image": "1024x768", "bs": 1}
        | {"targets": TARGETS, "attention": None, "resident": ["text-encoders", "vae"]},
    ),
    (  # the denoiser and T5 in FP8; fp8_base_unet leaves the text encoders
        "accelerate launch flux_train_network.py --pretrained_model_name_or_path x --fp8_base"
        " --network_train_unet_only --mixed_precision bf16 --resolution 512 --cache_latents",
        {"precision": "bf16-fp8-base", "adapter_dtype": "fp32", "resident": ["text-encoders-fp8"]},
    ),
    (
        "accelerate launch flux_train_network.py --pretrained_model_name_or_path x --fp8_base_unet"
        " --network_train_unet_only --mixed_precision fp16 --resolution 512 --cache_latents",
        {"precision": "fp16-fp8-base", "resident": ["text-encoders"]},
    ),
    (
        f"accelerate launch train_dreambooth_lora_sdxl.py {_XL} --optimizer Prodigy",
        {"optimizer": "prodigy"},
    ),
    (
        f"accelerate launch sdxl_train_network.py {_XL} --optimizer_type prodigyopt.Prodigy"
        " --resolution 1024",
        {"optimizer": "prodigy"},
    ),
    (
        "accelerate launch sdxl_train.py --pretrained_model_name_or_path x --full_bf16"
        " --optimizer_type adafactor --fused_backward_pass --resolution 1024 --cache_latents"
        " --cache_text_encoder_outputs",
        {"method": "full", "precision": "bf16-autocast", "optimizer": "adafactor"}
        | {"optimizer_in_backward": True, "attention": "math", "resident": None},
    ),
]


def options_of(line: str) -> dict[str, Any]:
    return with_job_file({"launch": shlex.split(line)}, [])


@pytest.mark.parametrize(("line", "expected"), LINES, ids=lambda x: str(x).split(".py")[0][-28:])
def test_a_line_says_these_options(line: str, expected: dict[str, Any]) -> None:
    found = options_of(line)
    assert {key: found.get(key) for key in expected} == expected


TOML = """
[model]
pretrained_model_name_or_path = "/models/sd_xl_base_1.0.safetensors"
[anything]
network_module = "networks.lora"
network_dim = 8
network_train_unet_only = true
resolution = "1024,1024"
mixed_precision = "bf16"
sdpa = true
nobody_has_this = 3
"""


def test_sections_of_a_file_mean_nothing_and_the_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(TOML.replace("[model]", "[model_arguments]"), encoding="utf-8")
    for found, rank in (
        (with_job_file({"job": str(path)}, []), 8),
        (
            options_of(
                f"accelerate launch sdxl_train_network.py --config_file {path} --network_dim 16"
            ),
            16,
        ),
    ):
        assert (found["model"], found["rank"], found["image"]) == ("sdxl", rank, "1024x1024")
        keys = found["job_keys"]
        assert isinstance(keys, JobKeys)
        assert [key.name for key in keys.of(KeyUse.UNKNOWN)] == ["nobody_has_this"]


def test_what_is_not_priced_is_named() -> None:
    found = options_of(
        f"accelerate launch train_dreambooth_lora_sdxl.py {_XL} --train_text_encoder"
        " --validation_prompt dog --instance_prompt dog --lr_scheduler constant"
    )
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    named = {key.name for key in keys.of(KeyUse.NOT_PRICED)}
    assert named == {"train_text_encoder", "validation_prompt", "instance_prompt"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"accelerate launch train_controlnet_sdxl.py {_XL}", "'train_controlnet_sdxl.py' trains"),
        (
            f"accelerate launch train_dreambooth_lora_sdxl.py {_XL} --optimizer Sophia",
            "add --optimizer",
        ),
    ],
)
def test_what_has_no_rules_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        options_of(line)


_SAVES = "--gradient_checkpointing --cache_latents --cache_text_encoder_outputs --resolution 1024"
# (launch line, GB of the GPU on which its repository says that it runs)
PUBLISHED = (
    (  # diffusers examples/dreambooth/README_sdxl.md [Dog toy example with < 16GB VRAM]
        f"accelerate launch train_dreambooth_lora_sdxl.py {_XL} --mixed_precision=fp16"
        " --resolution=1024 --train_batch_size=1 --gradient_accumulation_steps=4"
        " --enable_xformers_memory_efficient_attention --gradient_checkpointing --use_8bit_adam",
        16,
    ),
    (  # diffusers examples/dreambooth/README.md [Training on a 12GB GPU]
        f"accelerate launch train_dreambooth.py {_OLD} --with_prior_preservation --resolution=512"
        " --train_batch_size=1 --gradient_checkpointing --use_8bit_adam --set_grads_to_none"
        " --enable_xformers_memory_efficient_attention --mixed_precision fp16",
        16,
    ),
    (  # sd-scripts docs/train_SDXL-en.md [Tips for SDXL training]: 8 GB, dim 4 to 8
        f"accelerate launch sdxl_train_network.py {_XL} --network_train_unet_only --network_dim 8"
        f" --sdpa --optimizer_type AdamW8bit --mixed_precision bf16 {_SAVES}",
        8,
    ),
    (  # the same page: 24 GB, U-Net alone, Adafactor
        f"accelerate launch sdxl_train.py {_XL} --optimizer_type adafactor --sdpa"
        f" --mixed_precision bf16 --max_grad_norm 0 {_SAVES}",
        24,
    ),
    (  # diffusers examples/research_projects/flux_lora_quantization/README.md: a 24 GB 4090
        f"accelerate launch train_dreambooth_lora_flux_miniature.py {_FLUX} --mixed_precision=fp16"
        " --use_8bit_adam --resolution=1024 --train_batch_size=1 --gradient_accumulation_steps=4"
        " --gradient_checkpointing --cache_latents --rank=4",
        24,
    ),
)


@pytest.mark.parametrize(("line", "gb"), PUBLISHED, ids=lambda x: str(x).split(".py")[0][-28:])
def test_a_published_recipe_fits_where_it_was_said_to_run(line: str, gb: int) -> None:
    (e,) = priced(with_job_file({"launch": shlex.split(line), "gpu": "RTX 4090"}, []), [])
    assert e.memory.device.value / GIB < gb


def test_weights_in_fp8_decide_a_verdict() -> None:
    """sd-scripts docs/flux_train_network.md, VRAM Usage Optimization (with --fp8_base): 24 GB."""
    line = (
        f"accelerate launch flux_train_network.py {_FLUX} --network_module networks.lora_flux"
        " --network_train_unet_only --mixed_precision bf16 --optimizer_type adamw8bit --sdpa"
        f" {_SAVES}"
    )
    wide, narrow = (
        priced(with_job_file({"launch": shlex.split(each), "gpu": "RTX 4090"}, []), [])[0]
        for each in (line, f"{line} --fp8_base")
    )
    assert (wide.verdict, narrow.verdict) == (Verdict.DOES_NOT_FIT, Verdict.FITS)


AI_TOOLKIT = """
job: extension
config:
  process:
    - type: sd_trainer
      network: {type: lora, linear: 16}
      datasets:
        - {folder_path: x, cache_latents_to_disk: true, resolution: [512, 768, 1024]}
      train:
        {batch_size: 1, gradient_checkpointing: true, optimizer: adamw8bit, dtype: bf16,
         ema_config: {use_ema: true}}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true, quantize: QUANTIZE}
"""


def test_a_quantized_model_of_ai_toolkit_fits_where_its_example_says(tmp_path: Path) -> None:
    """ai-toolkit config/examples/train_lora_flux_24gb.yaml."""
    found: list[float] = []
    for word in ("true", "false"):
        path = tmp_path / "train.yaml"
        path.write_text(AI_TOOLKIT.replace("QUANTIZE", word), encoding="utf-8")
        options = with_job_file({"job": str(path), "gpu": "RTX 4090"}, [])
        (e,) = priced(options, [])
        assert (options.get("quant") == "quanto-fp8") is (word == "true")
        found.append(e.memory.device.value / GIB)
    assert found[0] < 24 < found[1]


@pytest.mark.parametrize(("said", "frames"), [("", 1), (", num_frames: 40", 37)])
def test_a_video_model_of_ai_toolkit_has_the_frames_of_its_data(
    tmp_path: Path, said: str, frames: int
) -> None:
    """ai-toolkit config/examples/train_lora_wan21_14b_24gb.yaml: one frame where none are said, a
    side cut to its buckets."""
    path = tmp_path / "train.yaml"
    text = AI_TOOLKIT.replace("QUANTIZE", "true").replace("[512, 768, 1024]", f"[632]{said}")
    text = text.replace("black-forest-labs/FLUX.1-dev, is_flux: true", "Wan-AI/Wan2.1-T2V-14B")
    path.write_text(text, encoding="utf-8")
    options = with_job_file({"job": str(path)}, [])
    assert (options["image"], options["frames"]) == ("624x624", frames)


PRESET = """{"training_method": "LORA", "model_type": "QWEN", "base_model_name": "Qwen/Qwen-Image",
 "batch_size": 2, "resolution": "512", "train_dtype": "BFLOAT_16",
 "transformer": {"weight_dtype": "FLOAT_8", "offload_fraction": SHARE},
 "text_encoder": {"train": false, "weight_dtype": "FLOAT_8"},
 "layer_filter": "attn,img_mlp,txt_mlp", "quantization": {"layer_filter": "transformer_block"}}"""


@pytest.mark.parametrize(("share", "gb"), [(0.5, 16), (0.1, 24)])
def test_a_preset_of_onetrainer_fits_the_gpu_that_it_is_named_for(
    tmp_path: Path, share: float, gb: int
) -> None:
    """OneTrainer training_presets/QwenImage, LoRA 16GB and 24GB: the next smaller GPU is not enough."""
    path = tmp_path / "preset.json"
    path.write_text(PRESET.replace("SHARE", str(share)), encoding="utf-8")
    (e,) = priced(with_job_file({"job": str(path), "gpu": "A100-80"}, []), [])
    assert gb - 8 < e.memory.device.value / GIB < gb


@pytest.mark.parametrize(
    ("asked", "targets"),
    [
        ('"layer_filter": "attn"', [".*(attn).*"]),
        ('"layer_filter": "^single.*", "layer_filter_regex": true', [".*(^single.*).*"]),
        ('"layer_filter_preset": "attn-mlp"', [".*(attn|ff\\.net|proj_mlp).*"]),
        ('"layer_filter": ""', [".*"]),
    ],
)
def test_filters_of_onetrainer_are_patterns(tmp_path: Path, asked: str, targets: list[str]) -> None:
    path = tmp_path / "preset.json"
    path.write_text(f'{{"training_method": "LORA", "model_type": "FLUX_DEV_1", {asked}}}')
    assert with_job_file({"job": str(path)}, [])["targets"] == targets


TUNED = {
    **{"model_family": "flux", "model_type": "lora", "train_batch_size": 1, "lora_rank": 16},
    "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
}
# documentation/quickstart/FLUX.md: precision, optimizer, side, GB that it says are used or needed
MEASURED = (
    ("int8-quanto", "adamw_bf16", 1024, 18.0),
    ("nf4-bnb", "bnb-lion8bit-paged", 1024, 12.0),
    ("nf4-bnb", "bnb-lion8bit-paged", 512, 9.09),
)
NEAR = 0.08  # "a bit more than"; the page's runs are of another torch and rank


@pytest.mark.parametrize(("base", "optimizer", "side", "gb"), MEASURED)
def test_flux_in_simpletuner_takes_what_its_page_says(
    tmp_path: Path, base: str, optimizer: str, side: int, gb: float
) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {**TUNED, "base_model_precision": base, "optimizer": optimizer, "resolution": side}
        )
    )
    (e,) = priced(with_job_file({"job": str(path), "gpu": "A100-80"}, []), [])
    assert e.memory.device.value / 1e9 == pytest.approx(gb, rel=NEAR)


def test_data_backends_of_simpletuner_are_read(tmp_path: Path) -> None:
    """The largest of them, from a folder above; without the file its key is named."""
    (tmp_path / "config" / "mine").mkdir(parents=True)
    path = tmp_path / "config" / "mine" / "config.json"
    asked = {"model_family": "wan", "model_type": "lora", "data_backend_config": "config/data.json"}
    path.write_text(json.dumps(asked))
    backends: list[dict[str, object]] = [
        {"id": "pictures", "resolution": 1024, "resolution_type": "pixel_area"},
        {"id": "v", "dataset_type": "video", "resolution": 480, "video": {"num_frames": 75}},
        {"id": "text", "dataset_type": "text_embeds", "resolution": 9999},
    ]
    options = with_job_file({"job": str(path)}, [])
    keys = options["job_keys"]
    assert isinstance(keys, JobKeys)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == ["data_backend_config"]
    (tmp_path / "config" / "data.json").write_text(json.dumps(backends))
    options = with_job_file({"job": str(path)}, [])
    assert (options["image"], options["frames"]) == ("512x512", 73)


@pytest.mark.parametrize(
    ("data", "image", "frames"),
    [
        ("resolutions = [512, 640]\nframe_buckets = [1, 33]\n[[directory]]\npath = 'a'\n", 640, 33),
        ("resolutions = [[1280, 720]]\n[[directory]]\npath = 'a'\n", 960, 1),
        ("[[directory]]\nsize_buckets = [[480, 480, 17], [512, 512, 81]]\n", 512, 81),
    ],
)
def test_sizes_of_diffusion_pipes_data_are_read(
    tmp_path: Path, data: str, image: int, frames: int
) -> None:
    """utils/dataset.py: folders override the file, a pair of sides is an area."""
    path = tmp_path / "train.toml"
    path.write_text(
        "dataset = 'data.toml'\n[model]\ntype = 'wan'\nckpt_path = 'Wan2.1-T2V-1.3B'\n"
        "[optimizer]\ntype = 'adamw'\n"
    )
    (tmp_path / "data.toml").write_text(data)
    options = with_job_file({"job": str(path)}, [])
    assert (options["image"], options["frames"]) == (f"{image}x{image}", frames)
