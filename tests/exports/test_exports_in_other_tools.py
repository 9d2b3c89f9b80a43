"""Exports taken by the tools themselves, where they are installed: axolotl's schema, torchtune's
builders, DeepSpeed's config.

None of the three is among the test requirements, since each brings or pins packages of its own;
without their dependencies they take seconds: `pip install --no-deps --target DIR axolotl addict`,
`torchtune==0.6.1 torchao==0.7.0 omegaconf antlr4-python3-runtime==4.9.3 sentencepiece tiktoken
blobfile kagglehub pycryptodomex lxml`, `DS_BUILD_OPS=0 ... deepspeed hjson py-cpuinfo msgpack`, and
DIR at the end of PYTHONPATH.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from exports.test_exports import CASES, TUNE_CASES
from napkinmath.estimate import estimate
from napkinmath.exports import export
from napkinmath.exports.torchtune import _BUILDERS
from napkinmath.inputs.options import train_config

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

AXOLOTL_CASES: dict[str, dict[str, object]] = {
    **CASES,
    "offloaded checkpoints": {"method": "lora", "checkpointing": "full", "offload": "checkpoints"},
    "fused loss": {"loss": "fused"},
    "compiled": {"compile": True},
    "adapters in bf16": {"method": "lora", "adapter_dtype": "bf16"},
    "unsloth's kernels": {"method": "lora", "kernels": "unsloth"},
    "own kernels": {"method": "lora", "kernels": "axolotl", "kernel_parts": "norm,qkv,mlp"},
    "in tf32": {"precision": "tf32"},
    "xformers": {"attention": "efficient", "optimizer": "paged-lion-8bit"},
}
DEEPSPEED_CASES: dict[str, dict[str, object]] = {
    "zero3 offloaded": {
        "gpus": "8",
        "zero": 3,
        "bs": 2,
        "grad_accum": 4,
        "offload": "optimizer,parameters",
    },
    "zero2": {"gpus": "4", "zero": 2},
    "zero1 in fp16": {"gpus": "2", "zero": 1, "precision": "fp16-amp"},
    "one GPU": {},
    "zero3 in fp32": {"gpus": "8", "zero": 3, "precision": "fp32", "clip": False},
}


@pytest.mark.parametrize("name", AXOLOTL_CASES)
def test_axolotls_schema_takes_the_file(name: str) -> None:
    """Every key is one of the schema's or of the plugins that the file names, and every value
    passes its validators."""
    schema = pytest.importorskip("axolotl.utils.schemas.config").AxolotlInputConfig
    content = yaml.safe_load(
        export(train_config(AXOLOTL_CASES[name]), "NousResearch/Llama-3.2-1B", "axolotl")[0]
    )
    plugins: tuple[
        Any, ...
    ] = ()  # whose fields axolotl merges into its schema (utils/config, integrations/config.py)
    if "axolotl.integrations.liger.LigerPlugin" in content.get("plugins", ()):
        plugins += (pytest.importorskip("axolotl.integrations.liger.args").LigerArgs,)
    if "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin" in content.get("plugins", ()):
        plugins += (
            pytest.importorskip("axolotl.integrations.cut_cross_entropy.args").CutCrossEntropyArgs,
        )
    merged: Any = type("Merged", (schema, *plugins), {}) if plugins else schema
    assert set(content) <= set(merged.model_fields), set(content) - set(merged.model_fields)
    extra = {"tensor_parallel_size": 1} if plugins else {}
    made = merged(
        **content,
        **extra,
        datasets=[{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
        learning_rate=1e-4,
    )
    assert (
        made.micro_batch_size == content["micro_batch_size"]
        and made.sequence_len == content["sequence_len"]
    )
    assert made.adapter == content.get("adapter") and made.lora_r == content.get("lora_r")
    assert bool(made.lora_mlp_kernel) == bool(content.get("lora_mlp_kernel")), (
        "nothing is turned on that was not priced"
    )


@pytest.mark.parametrize("model", _BUILDERS)
@pytest.mark.parametrize("name", TUNE_CASES)
def test_torchtune_builds_the_model_that_was_priced(model: str, name: str) -> None:
    torch, tune = pytest.importorskip("torch"), pytest.importorskip("torchtune.config")
    omegaconf = pytest.importorskip("omegaconf")
    config = train_config(TUNE_CASES[name])
    made = omegaconf.OmegaConf.create(export(config, model, "torchtune")[0])
    assert tune._utils._get_component_from_path(made.loss._component_) is not None
    tune.validate(omegaconf.OmegaConf.masked_copy(made, ["optimizer", "loss", "model"]))
    if config.quantization is not None:
        return  # its weights are made NF4 as the model is built, which needs real ones
    with torch.device("meta"):
        built = tune.instantiate(made.model)
    counts = {
        lora: sum(p.numel() for n, p in built.named_parameters() if ("lora" in n) is lora)
        for lora in (False, True)
    }
    priced = estimate(model, config)
    assert counts[False] == priced.num_parameters
    assert priced.num_trained == (counts[True] if config.adapter is not None else counts[False])


@pytest.mark.parametrize("name", DEEPSPEED_CASES)
def test_deepspeed_reads_the_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig
    config = train_config(DEEPSPEED_CASES[name])
    ranks = config.parallel.world_size
    for function, answer in (("get_world_size", ranks), ("is_initialized", True), ("get_rank", 0)):
        monkeypatch.setattr(f"deepspeed.comm.{function}", lambda *_, answer=answer, **__: answer)
    made = reader(json.loads(export(config, "llama-7b", "deepspeed")[0]), mpu=None)
    assert (
        made.train_batch_size
        == config.micro_batch_size * config.gradient_accumulation_steps * ranks
    )
    assert (made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps) == (
        config.micro_batch_size,
        config.gradient_accumulation_steps,
    )
    zero = made.zero_config
    assert int(zero.stage) == DEEPSPEED_CASES[name].get("zero", 0)
    assert (zero.offload_optimizer is not None, zero.offload_param is not None) == (
        config.offload.optimizer,
        config.offload.parameters,
    )
    if int(zero.stage) == 3:
        sizes = config.parallel.zero
        assert (
            zero.prefetch_bucket_size,
            zero.param_persistence_threshold,
            zero.max_live_parameters,
        ) == (
            sizes.prefetch_bucket_size,
            sizes.param_persistence_threshold,
            sizes.max_live_parameters,
        )
    assert made.gradient_clipping == (1.0 if config.clip_gradients else 0.0)
    assert (made.bfloat16_config.enabled, made.float16_config.enabled) == tuple(
        config.precision.value.startswith(kind) for kind in ("bf16", "fp16")
    )
