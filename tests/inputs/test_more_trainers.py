"""The trainers of marks.py: what each tool's file becomes, and the way out of what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from napkinmath.base import values
from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import read_job, with_job_file
from napkinmath.inputs.jobs import priced
from napkinmath.inputs.marks import MORE_TRAINERS

TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n'
# kind of job -> (ending, text, flags beside it, options it becomes, keys that are not priced)
Case = tuple[str, str, dict[str, object], dict[str, object], tuple[str, ...]]
CASES: dict[str, Case] = {
    "diffusers, what its launch line says": (
        "yaml",
        "script: train_dreambooth_lora\npretrained_model_name_or_path: sd-1.5\nresolution: 64\n"
        "train_batch_size: 1\nrank: 8\nmixed_precision: bf16\nvalidation_prompt: dog\n",
        {},
        {"model": "sd-1.5", "rank": 8, "image": "64x64", "resident": ["text-encoders", "vae"]},
        ("validation_prompt",),
    ),
    "sd-scripts, saved by its GUI": (
        "json",
        '{"LoRA_type": "Standard", "sdxl": true, "network_dim": 8, "network_alpha": 4, "optimizer":'
        ' "AdamW8bit", "max_resolution": "1024,768", "train_batch_size": 2, "mixed_precision":'
        ' "bf16", "gradient_checkpointing": true, "cache_latents": true, "xformers": "xformers",'
        ' "text_encoder_lr": 0, "unet_lr": 0.0001, "sdxl_no_half_vae": true, "conv_dim": 1,'
        ' "sdxl_cache_text_encoder_outputs": true, "num_processes": 1, "LyCORIS_preset": "full",'
        ' "pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0"}',
        {},
        {
            "rank": 8,
            "bs": 2,
            "image": "1024x768",
            "optimizer": "adamw-8bit",
            "precision": "bf16-autocast",
            "checkpointing": "full",
            "attention": None,
            "resident": None,
        },
        (),
    ),
    "sd-scripts, saved by its GUI's tab of fine-tuning": (
        "json",
        '{"sdxl_checkbox": true, "train_batch_size": 2, "batch_size": "4", "max_resolution":'
        ' "1024,1024", "optimizer": "AdamW8bit", "full_bf16": true, "mixed_precision": "bf16",'
        ' "pretrained_model_name_or_path": "", "gradient_checkpointing": true}',
        {},
        {"model": "sdxl", "bs": 2, "method": "full", "image": "1024x1024"},  # was SD 1.5's
        (),
    ),
    "sd-scripts, a file alone": (
        "toml",
        "[model_arguments]\npretrained_model_name_or_path = 'v1-5-pruned.safetensors'\n"
        "[network]\nnetwork_module = 'networks.lora'\nnetwork_dim = 8\nsdpa = true\n"
        "[training]\nresolution = '64,128'\nmax_grad_norm = 0\n",
        {},
        {"model": "sd-1.5", "rank": 8, "image": "64x128", "clip": False, "attention": None},
        ("network_train_unet_only",),
    ),
    "musubi-tuner, a file alone": (
        "toml",
        "network_module = 'networks.lora_wan'\ndit = 'wan.safetensors'\ntask = 'i2v-14B'\n"
        "network_dim = 8\nsdpa = true\nmixed_precision = 'bf16'\nfp8_base = true\n"
        "gradient_checkpointing = true\nblocks_to_swap = 20\noptimizer_type = 'adamw8bit'\n"
        "sample_prompts = 'prompts.txt'\n",
        {},
        {
            **{"model": "wan2.1-i2v-14b", "rank": 8, "stack": "sd-scripts", "method": "lora"},
            **{"precision": "bf16-fp8-base", "adapter_dtype": "fp32", "blocks_to_swap": 20},
            **{"optimizer": "adamw-8bit", "checkpointing": "full"},
        },
        ("dataset_config", "sample_prompts"),
    ),
    "diffusion-pipe, LoRA of Wan in 24 GB": (
        "toml",
        "dataset = 'd.toml'\nmicro_batch_size_per_gpu = 2\npipeline_stages = 1\n"
        "activation_checkpointing = 'unsloth'\nblocks_to_swap = 32\ngradient_clipping = 1.0\n"
        "[model]\ntype = 'wan'\nckpt_path = '/data/Wan2.1-T2V-14B'\ndtype = 'bfloat16'\n"
        "transformer_dtype = 'float8'\n[adapter]\ntype = 'lora'\nrank = 32\ndtype = 'bfloat16'\n"
        "[optimizer]\ntype = 'AdamW8bitKahan'\nlr = 2e-5\n",
        {},
        {
            **{"model": "wan2.1-t2v-14b", "rank": 32, "alpha": 32, "bs": 2, "blocks_to_swap": 32},
            **{"precision": "bf16-fp8-base", "adapter_dtype": "bf16", "checkpointing": "offload"},
            **{"optimizer": "adamw-8bit", "pp": None, "clip": True},
        },
        ("dataset", "optimizer.type"),
    ),
    "OneTrainer, LoRA with a part of the blocks on the host": (
        "json",
        '{"training_method": "LORA", "model_type": "QWEN", "base_model_name": "Qwen/Qwen-Image",'
        ' "batch_size": 2, "resolution": "512", "train_dtype": "BFLOAT_16", "compile": true,'
        ' "transformer": {"weight_dtype": "FLOAT_8", "offload_fraction": 0.5},'
        ' "text_encoder": {"train": false, "weight_dtype": "FLOAT_8"},'
        ' "layer_filter": "attn,img_mlp", "optimizer": {"optimizer": "ADAFACTOR"},'
        ' "optimizer_defaults": {"ADAFACTOR": {"fused_back_pass": true}}}',
        {},
        {
            **{"model": "qwen-image", "method": "lora", "rank": 16, "alpha": 1, "bs": 2},
            **{"targets": [".*(attn|img_mlp).*"], "blocks_to_swap": 30, "image": "512x512"},
            **{"precision": "bf16-fp8-base", "adapter_dtype": "fp32", "resident": None},
            **{"optimizer": "adafactor", "optimizer_in_backward": True, "checkpointing": "full"},
        },
        ("compile",),
    ),
    "SimpleTuner, LoRA over int8": (
        "json",
        '{"--model_family": "flux", "--model_type": "lora", "--model_flavour": "dev",'
        ' "--base_model_precision": "int8-quanto", "--resolution": 0.25, "--lora_rank": 8,'
        ' "--resolution_type": "area", "--optimizer": "bnb-lion8bit-paged",'
        ' "--flux_lora_target": "context", "--use_ema": "true", "--train_batch_size": 2}',
        {},
        {
            **{"model": "flux.1-dev", "method": "lora", "rank": 8, "alpha": 8, "bs": 2},
            **{"quant": "quanto-int8", "adapter_dtype": "bf16", "image": "512x512"},
            **{"optimizer": "paged-lion-8bit", "clip": False, "checkpointing": "full"},
            "targets": ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"],
        },
        ("use_ema",),
    ),
    "ai-toolkit, a checkpoint of one's own": (
        "yaml",
        "job: extension\nconfig: {process: [{type: sd_trainer, network: {type: lora, linear: 16},"
        " datasets: [{resolution: [512]}], train: {batch_size: 1, dtype: bf16, optimizer: adamw8bit,"
        " gradient_checkpointing: true}, model: {name_or_path: /opt/mine.safetensors,"
        " is_xl: true}}]}\n",
        {},
        {"model": "sdxl", "rank": 16, "bs": 1},
        (),
    ),
    "ai-toolkit, LoRA": (
        "yaml",
        "job: extension\nconfig:\n  name: x\n  process:\n  - type: sd_trainer\n"
        "    network: {type: lora, linear: 8, linear_alpha: 8}\n"
        "    datasets: [{folder_path: a, cache_latents: true, resolution: [64, 128]}]\n"
        "    train: {batch_size: 2, optimizer: adamw8bit, dtype: bf16, unload_text_encoder: true}\n"
        "    model: {name_or_path: runwayml/stable-diffusion-v1-5, low_vram: true}\n",
        {},
        {
            **{"model": "sd-1.5", "rank": 8, "bs": 2, "image": "128x128"},
            **{"optimizer": "adamw-8bit", "adapter_dtype": "fp32", "resident": None},
            "checkpointing": "full",
        },
        ("model.low_vram",),
    ),
    "torchtitan, FSDP": (
        "toml",
        TITAN + "[training]\nlocal_batch_size = 4\nseq_len = 8192\nmax_norm = 1.0\n",
        {"gpus": 8},
        {
            "model": "llama-3.1-8b",
            "bs": 4,
            "ctx": 8192,
            "precision": "bf16",
            "sharded_dtype": "fp32",
            "reduce_dtype": "fp32",
            "data_parallel": ["fsdp2"],
            "checkpointing": "interleaved:2",
            "optimizer": "adamw-fused",
        },
        (),
    ),
    "torchtitan, one GPU": (
        "toml",
        TITAN + "[activation_checkpoint]\nmode = 'none'\n[validation]\nenable = true\n",
        {"gpus": 1},
        {"precision": "bf16-amp", "data_parallel": None, "bs": 8, "checkpointing": "none"},
        ("validation.enable",),
    ),
    "torchtitan, a pipeline": (
        "toml",
        TITAN
        + "[parallelism]\npipeline_parallel_degree = 4\ntensor_parallel_degree = 2\n"
        + "data_parallel_shard_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'\n"
        + "enable_async_tensor_parallel = true\n"
        + "[activation_checkpoint]\nselective_ac_option = 'op'\n",
        {},
        {
            "gpus": 16,
            "tp": 2,
            "pp": 4,
            "bs": 1,
            "grad_accum": 8,
            "pp_schedule": "interleaved",
            "reshard": False,
            "checkpointing": "selective:sdpa,q_proj,v_proj,gate_proj,down_proj",
        },
        ("parallelism.enable_async_tensor_parallel",),
    ),
    "torchtitan, degrees without a number of GPUs": (
        "toml",
        TITAN + "norm_type = 'rmsnorm'\n[training]\nwarmup_steps = 5\n"
        "[parallelism]\ntensor_parallel_degree = 4\n[float8]\nenable_float8_linear = true\n",
        {},
        {"gpus": 4, "tp": 4, "data_parallel": ["fsdp2"], "precision": "fp8"},
        ("parallelism.data_parallel_shard_degree",),
    ),
    "torchtitan, shards among the training's keys": (
        "toml",
        TITAN + "[training]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4\n"
        "tensor_parallel_degree = 2\n",
        {},
        {"gpus": 16, "tp": 2, "sharding": "hybrid", "shard_size": 4, "precision": "bf16"},
        (),
    ),
    "torchtitan, fp8 and copies": (
        "toml",
        TITAN.replace("8B", "70B")
        + "converters = ['float8']\n[parallelism]\ndata_parallel_replicate_degree = 2\n"
        + "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n",
        {"gpus": 16},
        {"precision": "fp8", "sharding": "hybrid", "shard_size": 8, "sharded_dtype": "fp32"},
        ("quantize.linear.float8.enable_fsdp_float8_all_gather",),
    ),
    "torchtitan, sections written with dots": (
        "yaml",
        "model.flavor: 8B\nmodel.name: llama3\ntraining.batch_size: 2\n"
        "model.converters: [float8]\nfloat8.recipe_name: rowwise\n",
        {"gpus": 8},
        {"model": "llama-3.1-8b", "bs": 2, "ctx": 2048, "precision": "fp8-row"},
        (),
    ),
    "litgpt, QLoRA": (
        "yaml",
        "checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B\nprecision: bf16-true\n"
        "quantize: bnb.nf4-dq\nlora_r: 32\nlora_key: true\ndevices: 1\ntrain:\n"
        "  micro_batch_size: 2\n  global_batch_size: 8\n  max_seq_length: 512\n"
        "optimizer:\n  class_path: torch.optim.AdamW\n  init_args: {lr: 0.0002}\n",
        {},
        {
            "model": "Llama-3.2-1B",
            "precision": "bf16",
            "quant": "nf4",
            "double_quant": True,
            "rank": 32,
            "targets": ["q_proj", "query_key_value", "qkv_proj", "k_proj", "v_proj"],
            "bs": 2,
            "ctx": 512,
            "grad_accum": 4,
            "clip": False,
            "optimizer": "paged-adamw",
            "checkpointing": "none",
        },
        ("chunked_cross_entropy",),
    ),
    "litgpt, full on several GPUs": (
        "yaml",
        "checkpoint_dir: meta-llama/Llama-3.2-1B\nprecision: bf16-true\ndevices: 4\ntrain:\n"
        "  micro_batch_size: 4\n  global_batch_size: 64\n  max_seq_length: 512\n",
        {},
        {"gpus": 4, "data_parallel": ["fsdp1"], "checkpointing": "full", "grad_accum": 4},
        ("chunked_cross_entropy",),
    ),
    "litgpt, pretraining": (
        "yaml",
        "model_name: tiny-llama-1.1b\nprecision: bf16-mixed\ndevices: auto\ntrain:\n"
        "  micro_batch_size: 4\n  max_seq_length: 2048\n  max_norm: 1.0\n",
        {"gpus": 8},
        {
            "method": "full",
            "precision": "bf16-amp",
            "sharding": "hybrid",
            "compile": True,
            "clip": True,
            "optimizer": "adamw-fused",
        },
        ("chunked_cross_entropy",),
    ),
    "AutoTrain, DPO with QLoRA": (
        "yaml",
        "task: llm-dpo\nbase_model: llama-3.2-1b\nproject_name: x\nlog: none\nbackend: local\n"
        "data: {path: a/b, train_split: train, valid_split: null, chat_template: chatml,\n"
        "  column_mapping: {text_column: chosen, rejected_text_column: rejected}}\n"
        "params: {block_size: 512, model_max_length: 2048, batch_size: 2, peft: true,\n"
        "  quantization: int4, mixed_precision: fp16, gradient_accumulation: 8}\n"
        "hub: {username: me, token: no, push_to_hub: true}\n",
        {},
        {
            **{"model": "llama-3.2-1b", "workload": "dpo", "bs": 2, "grad_accum": 8, "ctx": 512},
            **{"method": "lora", "rank": 16, "alpha": 32, "quant": "nf4", "stack": "trl-0.14"},
            **{"precision": "fp16-autocast", "checkpointing": "full", "reentrant": True},
        },
        (),
    ),
    "AutoTrain, a classifier": (
        "yaml",
        "task: text_classification\nbase_model: bert-base-uncased\ndata: {path: imdb}\n"
        "params: {max_seq_length: 256, batch_size: 4, mixed_precision: bf16}\n",
        {},
        {
            **{"task": "sequence-classification", "method": "full", "bs": 4, "ctx": 256},
            **{"precision": "bf16-amp", "checkpointing": "none"},
        },
        (),
    ),
    "AutoTrain, pictures with one label": (
        "yaml",
        "task: image_regression\nbase_model: microsoft/resnet-50\ndata: {path: a}\n"
        "params: {batch_size: 4, mixed_precision: fp16}\n",
        {},
        {
            **{"task": "image-classification", "bs": 4, "precision": "fp16-amp", "ctx": None},
            **{"method": "full", "checkpointing": "none"},
        },
        (),
    ),
    "AutoTrain, an encoder with a decoder": (
        "yaml",
        "task: seq2seq\nbase_model: google/flan-t5-small\ndata: {path: a, valid_split: test}\n"
        "params: {max_seq_length: 512, batch_size: 4}\n",
        {},
        {
            **{"task": "seq2seq-lm", "bs": 4, "ctx": 512, "target_ctx": 128, "precision": "fp32"},
            **{"method": "full", "quant": None, "checkpointing": "none"},
        },
        ("data.valid_split",),
    ),
    "AutoTrain, an encoder with a decoder and adapters": (
        "yaml",
        "task: seq2seq\nbase_model: google/flan-t5-small\ndata: {path: a}\n"
        "params: {peft: true, lora_r: 4}\n",
        {},
        {
            **{"method": "lora", "rank": 4, "quant": "int8", "targets": "all-linear", "bs": 2},
            **{"checkpointing": "full"},
        },
        (),
    ),
    "AutoTrain, answers in a text": (
        "yaml",
        "task: extractive-qa\nbase_model: bert-base-uncased\ndata: {path: lhoestq/squad}\n"
        "params: {max_seq_length: 512, max_doc_stride: 128, batch_size: 4}\n",
        {},
        {"task": "question-answering", "bs": 4, "ctx": 512, "precision": "fp32"},
        (),
    ),
    "AutoTrain, embeddings": (
        "yaml",
        "task: sentence-transformers:triplet\nbase_model: microsoft/mpnet-base\n"
        "data: {path: sentence-transformers/all-nli}\n"
        "params: {max_seq_length: 512, batch_size: 8, mixed_precision: fp16}\n",
        {},
        {
            **{"workload": "contrastive", "columns": 3, "bs": 8, "ctx": 512},
            **{"precision": "fp16-amp", "checkpointing": "none", "stack": None},
        },
        (),
    ),
    "Unsloth Studio, its export": (
        "yaml",
        "training: {max_seq_length: 4096, batch_size: 4, packing: true, optim: adamw_8bit,\n"
        "  gradient_checkpointing: unsloth, train_on_completions: true}\n"
        "lora: {lora_r: 16, lora_dropout: 0, target_modules: [all-linear, q_proj, up_proj],\n"
        "  use_rslora: true, finetune_vision_layers: false}\n",
        {"model": "llama-3.2-1b"},
        {
            **{"method": "lora", "rank": 16, "targets": ["q_proj", "up_proj"], "rslora": True},
            **{"quant": "nf4", "double_quant": True, "kernels": "unsloth", "packing": True},
            **{"bs": 4, "grad_accum": 4, "ctx": 4096, "checkpointing": "offload"},
        },
        ("lora.finetune_vision_layers",),
    ),
    "Unsloth Studio, DoRA": (
        "yaml",
        "training: {max_seq_length: 512, batch_size: 2}\nlora: {lora_r: 8, use_dora: true}\n",
        {"model": "llama-3.2-1b"},
        {"method": "dora", "rank": 8, "quant": "nf4", "checkpointing": "offload"},
        ("lora.use_dora",),
    ),
    "Unsloth Studio, full by its command's file": (
        "yaml",
        "model: unsloth/Qwen2.5-0.5B\ntraining: {training_type: full, batch_size: 1,\n"
        "  load_in_4bit: true, gradient_checkpointing: none}\nlora: {lora_r: 64}\n",
        {},
        {"model": "unsloth/Qwen2.5-0.5B", "method": "full", "bs": 1, "checkpointing": "none"},
        (),
    ),
    "Firefly, QLoRA without a word": (
        "json",
        '{"model_name_or_path": "01-ai/Yi-6B-Chat", "train_file": "a.jsonl", "template_name": "yi",'
        ' "max_seq_length": 512, "lora_rank": 64, "lora_alpha": 16, "fp16": true}',
        {},
        {"method": "lora", "rank": 64, "quant": "nf4", "double_quant": True, "ctx": 512},
        (),
    ),
    "Firefly, DPO with LoRA": (
        "json",
        '{"model_name_or_path": "01-ai/Yi-6B-Chat", "train_mode": "lora", "task_type": "dpo",'
        ' "max_seq_length": 512, "lora_rank": 8, "bf16": true}',
        {},
        {"method": "lora", "rank": 8, "workload": "dpo", "ctx": 512},
        (),
    ),
    "ms-swift, LoRA under ZeRO": (
        "yaml",
        "model: Qwen/Qwen2.5-0.5B-Instruct\ntorch_dtype: bfloat16\ntuner_type: lora\n"
        "lora_rank: 8\ntarget_modules: all-linear\nmax_length: 512\ndeepspeed: zero2\n"
        "per_device_train_batch_size: 2\nattn_impl: flash_attn\nsystem: You are kind.\n",
        {"gpus": 4},
        {
            "model": "Qwen/Qwen2.5-0.5B-Instruct",
            "method": "lora",
            "rank": 8,
            "alpha": 32,
            "dropout": 0.05,
            "targets": "all-linear",
            "bs": 2,
            "ctx": 512,
            "data_parallel": ["zero2"],
            "checkpointing": "full",
            "reentrant": True,
            "precision": "bf16-autocast",
            "attention": "flash2",
        },
        (),
    ),
    "ms-swift 3, by its older word for a tuner": (
        "yaml",
        "rlhf_type: grpo\nmodel: Qwen/Qwen2.5-0.5B-Instruct\ntrain_type: lora\n"
        "torch_dtype: bfloat16\nmax_completion_length: 128\nper_device_train_batch_size: 2\n",
        {},
        {"method": "lora", "rank": 8, "workload": "grpo", "ctx": 640, "completion": 128},
        (),
    ),
    "ms-swift, DPO of a quantized base under DDP": (
        "yaml",
        "model: Qwen/Qwen2.5-0.5B-Instruct\ntuner_type: lora\nquant_bits: 4\nquant_method: bnb\n"
        "rlhf_type: dpo\nmax_length: 512\nfreeze_parameters_ratio: 0.5\n"
        "gradient_checkpointing_kwargs: '{\"use_reentrant\": true}'\n",
        {"gpus": 2},
        {"quant": "nf4", "double_quant": True, "workload": "dpo", "reentrant": True, "bs": 1},
        ("freeze_parameters_ratio",),
    ),
    "verl, lengths that turns share": (
        "yaml",
        "data: {max_prompt_length: null, max_response_length: null, train_batch_size: 8}\n"
        "actor_rollout_ref: {model: {path: Qwen/Qwen2.5-0.5B}, actor: {ppo_mini_batch_size: 8,"
        " ppo_micro_batch_size_per_gpu: 1}, rollout: {name: hf, max_model_len: 700,"
        " response_length: 100}}\nalgorithm: {adv_estimator: grpo}\n"
        "trainer: {n_gpus_per_node: 1, nnodes: 1}\n",
        {},
        {"ctx": 700, "completion": 100, "bs": 1, "grad_accum": 8},
        ("actor_rollout_ref.rollout",),
    ),
    "verl, GRPO under FSDP, written with dots": (
        "yaml",
        "algorithm.adv_estimator: grpo\nactor_rollout_ref.model.path: Qwen/Qwen2.5-0.5B-Instruct\n"
        "data.max_prompt_length: 512\ndata.max_response_length: 1024\n"
        "actor_rollout_ref.actor.ppo_mini_batch_size: 64\n"
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 4\n"
        "actor_rollout_ref.actor.use_kl_loss: true\nactor_rollout_ref.rollout.n: 5\n"
        "actor_rollout_ref.rollout.name: vllm\nactor_rollout_ref.ref.fsdp_config.param_offload:"
        " true\n+actor_rollout_ref.actor.fsdp_config.param_offload: true\n"
        "critic.ppo_epochs: 2\ntrainer.n_gpus_per_node: 4\n",
        {},
        {
            "workload": "grpo",
            "ctx": 1536,
            "completion": 1024,
            "bs": 4,
            "grad_accum": 20,
            "gpus": 4,
            "data_parallel": ["fsdp1"],
            "precision": "bf16",
            "sharded_dtype": "fp32",
            "reference": True,
            "reference_at": "offload",
            "checkpointing": "full",
        },
        ("actor_rollout_ref.rollout", "data.max_response_length"),
    ),
    "verl's SFT, LoRA": (
        "yaml",
        "model.partial_pretrain: Qwen/Qwen2.5-0.5B-Instruct\nmodel.lora_rank: 32\n"
        "data.train_batch_size: 64\ndata.micro_batch_size_per_gpu: 4\ntrainer.n_gpus_per_node: 4\n",
        {},
        {"method": "lora", "rank": 32, "ctx": 1024, "bs": 4, "grad_accum": 4, "gpus": 4},
        (),
    ),
    "verl's SFT, one GPU": (
        "yaml",
        "model.partial_pretrain: Qwen/Qwen2.5-0.5B-Instruct\ndata.train_batch_size: 64\n",
        {"gpus": 1},
        {"precision": "bf16", "data_parallel": ["fsdp2"], "sharded_dtype": "fp32"},
        (),
    ),
    "verl's SFT by its engines": (
        "yaml",
        "model.path: Qwen/Qwen2.5-0.5B-Instruct\ndata.train_files: a\ndata.max_length: 2048\n"
        "engine: fsdp\nengine.strategy: fsdp2\nengine.ulysses_sequence_parallel_size: 2\n"
        "model.use_remove_padding: false\ntrainer.n_gpus_per_node: 8\n",
        {},
        {
            "stack": "verl-engine",
            "gpus": 8,
            "data_parallel": ["fsdp2"],
            "sharded_dtype": "fp32",
            "reduce_dtype": "fp32",
            "cp": 2,
            "bs": 8,
            "grad_accum": 8,
            "optimizer": "adamw-foreach",
            "checkpointing": "full",
        },
        (),
    ),
    "verl's SFT by its engines, rows of their own": (
        "yaml",
        "model.path: Qwen/Qwen2.5-0.5B-Instruct\ndata.use_dynamic_bsz: false\n"
        "data.micro_batch_size_per_gpu: 4\ndata.train_batch_size: 64\nmodel.lora_rank: 32\n"
        "engine.model_dtype: bf16\nengine.fsdp_size: 2\ntrainer.n_gpus_per_node: 4\n"
        "data.train_files: a\n",
        {},
        {
            "method": "lora",
            "rank": 32,
            "bs": 4,
            "grad_accum": 4,
            "sharded_dtype": "bf16",
            "sharding": "hybrid",
        },
        ("data.max_length",),
    ),
    "verl, one GPU": (
        "yaml",
        "algorithm.adv_estimator: rloo\nactor_rollout_ref.model.path: Qwen/Qwen2.5-0.5B-Instruct\n"
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 4\ntrainer.n_gpus_per_node: 1\n"
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward: false\n",
        {},
        {"precision": "bf16", "data_parallel": ["fsdp1"], "reshard": None, "gpus": 1},
        ("data.max_response_length", "actor_rollout_ref.rollout"),
    ),
    "verl, PPO in a mesh": (
        "yaml",
        "actor_rollout_ref:\n  model: {path: Qwen/Qwen2.5-0.5B-Instruct}\n  actor:\n"
        "    strategy: megatron\n    ppo_micro_batch_size_per_gpu: 2\n    megatron:\n"
        "      tensor_model_parallel_size: 2\n  rollout: {name: sglang, gpu_memory_utilization: 0.5}\n"
        "trainer: {n_gpus_per_node: 8, nnodes: 2}\n",
        {},
        {"tp": 2, "gpus": 16, "data_parallel": ["zero1"], "stack": "megatron", "workload": "ppo"},
        ("data.max_response_length", "actor_rollout_ref.rollout"),
    ),
    "verl, its engine": (
        "yaml",
        "algorithm.adv_estimator: grpo\nactor_rollout_ref.model.path: Qwen/Qwen2.5-0.5B-Instruct\n"
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 2\ntrainer.n_gpus_per_node: 4\n"
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload: true\n"
        "actor_rollout_ref.rollout: {name: vllm, n: 8, gpu_memory_utilization: 0.4,"
        " tensor_model_parallel_size: 1, free_cache_engine: false, temperature: 0.7,"
        " log_prob_micro_batch_size_per_gpu: 16, enable_chunked_prefill: true,"
        " checkpoint_engine: {update_weights_bucket_megabytes: 512}}\n",
        {"gpu": "H100"},
        {
            "rollout": "vllm",
            "rollout_trainer": "verl",
            "rollout_memory": 0.4,
            "rollout_tp": 1,
            "rollout_sleep": 0,
            "rollout_group": 8,
            "rollout_bucket": "512MiB",
            "rollout_offload": "optimizer",
            "score_bs": 16,
        },
        ("data.max_response_length",),
    ),
    "TRL, vLLM on the policy's GPU": (
        "yaml",
        "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\nper_device_train_batch_size: 4\n"
        "num_generations: 4\nuse_vllm: true\nvllm_gpu_memory_utilization: 0.4\n"
        "vllm_enable_sleep_mode: true\n",
        {"gpu": "H100"},
        {
            "workload": "grpo",
            "rollout": "vllm",
            "rollout_trainer": "trl",
            "rollout_memory": 0.4,
            "rollout_sleep": 2,
            "rollout_group": 4,
        },
        (),
    ),
    "TRL, vLLM as a server": (
        "yaml",
        "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\nper_device_train_batch_size: 4\n"
        "use_vllm: true\nvllm_mode: server\nvllm_gpu_memory_utilization: 0.4\n",
        {"gpu": "H100"},
        {"workload": "grpo", "rollout": "none", "rollout_memory": None},
        ("use_vllm",),
    ),
    "ms-swift, vLLM on the policy's GPUs": (
        "yaml",
        "model: Qwen/Qwen2.5-0.5B-Instruct\ntuner_type: lora\nrlhf_type: grpo\nuse_vllm: true\n"
        "vllm_mode: colocate\nsleep_level: 1\noffload_optimizer: true\n",
        {"gpu": "H100"},
        {
            "rollout_trainer": "ms-swift",
            "rollout_sleep": 1,
            "rollout_offload": "optimizer",
            "rollout_memory": None,
        },
        (),
    ),
    "verl, an engine on GPUs of its own": (
        "yaml",
        "algorithm.adv_estimator: grpo\nactor_rollout_ref.model.path: Qwen/Qwen2.5-7B\n"
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 1\ntrainer.n_gpus_per_node: 8\n"
        "actor_rollout_ref.hybrid_engine: false\nrollout.nnodes: 2\nrollout.n_gpus_per_node: 4\n"
        "async_training.staleness_threshold: 0.5\n",
        {"gpu": "h100-sxm"},
        {"gpus": 8, "rollout": "vllm", "rollout_gpus": "8xh100-sxm", "rollout_sleep": None},
        ("async_training.staleness_threshold",),
    ),
    "verl, a reward model that an engine serves": (
        "yaml",
        "algorithm.adv_estimator: grpo\nactor_rollout_ref.model.path: Qwen/Qwen2.5-0.5B-Instruct\n"
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 2\ntrainer.n_gpus_per_node: 1\n"
        "reward.num_workers: 4\nreward.custom_reward_function.path: a.py\n"
        "reward.reward_model.enable: true\nreward.reward_model.model_path: a/b\n"
        "reward.reward_model.rollout.gpu_memory_utilization: 0.5\n",
        {"gpu": "H100"},
        {"workload": "grpo"},
        (
            "data.max_response_length",
            "reward.reward_model.model_path",
            "reward.reward_model.rollout.gpu_memory_utilization",
        ),
    ),
    "verl, a critic that is mostly as the policy": (
        "yaml",
        "algorithm.adv_estimator: gae\nactor_rollout_ref.model.path: Qwen/Qwen2.5-0.5B-Instruct\n"
        "actor_rollout_ref.model.enable_gradient_checkpointing: true\n"
        "critic.model.enable_gradient_checkpointing: true\n"
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 2\n"
        "critic.ppo_micro_batch_size_per_gpu: 4\ntrainer.n_gpus_per_node: 1\n",
        {"gpu": "H100"},
        {"workload": "ppo", "rollout": "vllm"},
        ("data.max_response_length", "critic.ppo_micro_batch_size_per_gpu"),
    ),
    "Megatron-SWIFT, vLLM on the policy's GPUs": (
        "yaml",
        "model: Qwen/Qwen2.5-0.5B-Instruct\ntuner_type: full\nmicro_batch_size: 1\nmax_length: 1024\n"
        "tensor_model_parallel_size: 2\nrlhf_type: grpo\nuse_vllm: true\nvllm_mode: colocate\n"
        "beta: 0.0\nvllm_gpu_memory_utilization: 0.3\nsleep_level: 2\noffload_model: true\n",
        {"gpus": "2xH100"},
        {
            "workload": "grpo",
            "reference": False,
            "rollout_trainer": "ms-swift",
            "rollout_memory": 0.3,
            "rollout_sleep": 2,
            "rollout_offload": "policy",
        },
        (),
    ),
    "verl, an engine in a mesh": (
        "yaml",
        "actor_rollout_ref:\n  model: {path: Qwen/Qwen2.5-0.5B-Instruct}\n  actor:\n"
        "    strategy: megatron\n    ppo_micro_batch_size_per_gpu: 2\n    megatron:\n"
        "      tensor_model_parallel_size: 2\n  rollout: {name: sglang}\n"
        "trainer: {n_gpus_per_node: 8}\n",
        {"gpu": "H100"},
        {"tp": 2, "workload": "ppo", "rollout": "sglang", "rollout_tp": None},
        ("data.max_response_length",),
    ),
    "gpt-neox, its own sizes": (
        "yaml",
        '{"num-layers": 4, "hidden-size": 256, "num-attention-heads": 4, "seq-length": 512,'
        ' "pos-emb": "rotary", "no-weight-tying": true, "attention-config": [[["flash"], 4]],'
        ' "optimizer": {"type": "Adam", "params": {"lr": 0.0006}}, "zero_optimization": {"stage": 1},'
        ' "train_micro_batch_size_per_gpu": 4, "checkpoint-activations": true, "gradient_clipping":'
        ' 1.0, "fp16": {"fp16": true, "enabled": true}, "partition-activations": true,}',
        {"gpus": 8},
        {
            "bs": 4,
            "ctx": 512,
            "precision": "fp16",
            "data_parallel": ["zero1"],
            "checkpointing": "full",
            "attention": "flash2",
            "optimizer": "adamw-fused",
        },
        ("partition_activations",),
    ),
    "gpt-neox, a tokenizer that is not known": (
        "yaml",
        "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\npos_emb: rotary\nno_weight_tying: true\n"
        "tokenizer_type: TiktokenTokenizer\n"
        "vocab_file: arcade100k.tiktoken\ngas: 1\n",
        {"gpus": 1},
        {"bs": 1, "ctx": 2048},
        ("vocab_file",),
    ),
    "gpt-neox, a gated MLP": (
        "yaml",
        "num_layers: 2\nhidden_size: 4096\nnum_attention_heads: 32\nnum_kv_heads: 8\npos_emb: rotary\n"
        "intermediate_size: 32768\nmlp_multiple_of: 256\nactivation: swiglu\nnorm: rmsnorm\n"
        "no_weight_tying: true\nmake_vocab_size_divisible_by: 1\npadded_vocab_size: 32000\n",
        {},
        {
            "config": {
                "model_type": "llama",
                "hidden_size": 4096,
                "num_hidden_layers": 2,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 11008,
                "vocab_size": 32000,
                "tie_word_embeddings": False,
                "max_position_embeddings": 2048,
            },
            "gpus": 1,
        },
        ("data_parallel_size",),
    ),
    "nanotron, sizes of its own": (
        "yaml",
        "model:\n  dtype: bfloat16\n  make_vocab_size_divisible_by: 8\n  model_config:\n"
        "    is_llama_config: true\n    hidden_size: 256\n    intermediate_size: 512\n"
        "    num_hidden_layers: 4\n    num_attention_heads: 4\n    num_key_value_heads: 2\n"
        "    vocab_size: 100\n    tie_word_embeddings: true\n    z_loss_enabled: true\n"
        "optimizer:\n  zero_stage: 1\n  clip_grad: 1.0\n  accumulate_grad_in_fp32: true\n"
        "parallelism: {dp: 2, tp: 2, pp: 1, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER,"
        " tp_recompute_allgather: false}\n"
        "tokens: {micro_batch_size: 2, sequence_length: 256, batch_accumulation_per_replica: 4}\n",
        {},
        {
            "config": {
                "model_type": "llama",
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 112,
                "tie_word_embeddings": True,
            },
            "stack": "nanotron-2024",
            "gpus": 4,
            "tp": 2,
            "sequence_parallel": True,
            "data_parallel": ["zero1"],
            "bs": 2,
            "ctx": 256,
            "grad_accum": 4,
            "clip": True,
        },
        ("model.model_config.z_loss_enabled",),
    ),
    "nanotron, StarCoder 2 of its earlier keys": (
        "yaml",
        "tokens: {micro_batch_size: 2, sequence_length: 64}\nparallelism: {dp: 2, tp: 1, pp: 1,"
        " recompute_granularity: FULL}\nmodel: {dtype: bfloat16, model_config:"
        " {is_starcoder2_config: true, hidden_size: 64, num_hidden_layers: 2, vocab_size: 256,"
        " num_attention_heads: 4, num_kv_heads: 2}}\n",
        {},
        {
            "config": {
                "model_type": "starcoder2",
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 256,
            },
            "checkpointing": "full",
        },
        (),
    ),
    "oumi, QLoRA under FSDP": (
        "yaml",
        "model:\n  model_name: meta-llama/Llama-3.2-1B\n  model_max_length: 1024\n"
        "  torch_dtype_str: bfloat16\n  attn_implementation: sdpa\n  trust_remote_code: true\n"
        "training:\n  trainer_type: TRL_SFT\n  use_peft: true\n  per_device_train_batch_size: 2\n"
        "  enable_gradient_checkpointing: true\n  gradient_checkpointing_kwargs: {use_reentrant:"
        " false}\n  optimizer: adamw_torch_fused\npeft:\n  q_lora: true\n  lora_r: 16\n"
        "  lora_target_modules: [q_proj, v_proj]\n  bnb_4bit_quant_type: nf4\n"
        "fsdp: {enable_fsdp: true, sharding_strategy: HYBRID_SHARD, auto_wrap_policy:"
        " TRANSFORMER_BASED_WRAP}\n",
        {"gpus": 16},
        {
            "quant": "nf4",
            "rank": 16,
            "alpha": 8,
            "targets": ["q_proj", "v_proj"],
            "ctx": 1024,
            "bs": 2,
            "reentrant": False,
            "data_parallel": ["fsdp1"],
            "sharding": "hybrid",
            "precision": "bf16",
        },
        (),
    ),
    "oumi, DPO under ZeRO": (
        "yaml",
        "model: {model_name: meta-llama/Llama-3.2-1B, torch_dtype_str: float32}\ntraining:\n"
        "  trainer_type: TRL_DPO\n  mixed_precision_dtype: bf16\n  full_determinism: true\n"
        "deepspeed: {enable_deepspeed: true, zero_stage: 2, offload_optimizer: {device: cpu}}\n",
        {"gpus": 2},
        {
            "workload": "dpo",
            "bs": 8,
            "data_parallel": ["zero2"],
            "offload": "optimizer",
            "precision": "bf16-amp",
        },
        ("training.full_determinism",),
    ),
    "OpenRLHF, SFT": (
        "yaml",
        "model.model_name_or_path: meta-llama/Llama-3.2-1B\ndata.max_len: 1024\n"
        "train.micro_batch_size: 2\ntrain.batch_size: 256\nds.zero_stage: 3\nds.param_dtype: bf16\n"
        "ds.attn_implementation: flash_attention_2\nds.packing_samples: true\n"
        "model.gradient_checkpointing_enable: true\nadam.lr: 5e-6\nds.deepcompile: true\n",
        {"gpus": 8},
        {
            "ctx": 1024,
            "bs": 2,
            "grad_accum": 16,
            "data_parallel": ["zero3"],
            "packing": True,
            "checkpointing": "full",
            "optimizer": "adamw-fused",
        },
        ("ds.deepcompile",),
    ),
    "OpenRLHF, GRPO on the same GPUs": (
        "yaml",
        "actor: {model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct, num_gpus_per_node: 4, adam: {lr:"
        " 5e-7}}\nreward: {model_name_or_path: mine/unheard-of-rm}\ncritic: {value_clip: 0.5}\n"
        "algo: {advantage: {estimator: group_norm}}\ndata: {max_len: 1024}\n"
        "train: {colocate_all: true, batch_size: 128}\nvllm: {num_engines: 4}\nds: {zero_stage: 2}\n",
        {},
        {"workload": "grpo", "gpus": 4, "bs": 1, "grad_accum": 32, "reference": True},
        ("reward.model_name_or_path", "vllm.num_engines"),
    ),
    "OpenRLHF, engines on the same GPUs": (
        "yaml",
        "actor: {model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct, num_gpus_per_node: 4}\n"
        "algo: {advantage: {estimator: group_norm}}\nrollout: {n_samples_per_prompt: 8}\n"
        "train: {colocate_all: true, batch_size: 128}\nds: {zero_stage: 3, enable_sleep: true}\n"
        "vllm: {num_engines: 4, gpu_memory_utilization: 0.5, enable_sleep: true}\n",
        {"gpu": "H100"},
        {
            "rollout_memory": 0.5,
            "rollout_tp": 1,
            "rollout_sleep": 1,
            "rollout_offload": "optimizer",
            "rollout_gpus": None,
        },
        (),
    ),
    "OpenRLHF, engines of their own, a step ahead": (
        "yaml",
        "actor: {model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct, num_gpus_per_node: 4}\n"
        "train: {async_enable: true, batch_size: 128}\nalgo: {advantage: {estimator: group_norm}}\n"
        "vllm: {num_engines: 2, tensor_parallel_size: 2}\n",
        {"gpus": "4xH100"},
        {"rollout_gpus": "4xH100", "rollout_tp": 2, "rollout_staleness": 1, "rollout_sleep": None},
        (),
    ),
    "NeMo Automodel, LoRA of packed rows": (
        "yaml",
        "recipe: TrainFinetuneRecipeForNextTokenPrediction\nstep_scheduler: {local_batch_size: 2,"
        " global_batch_size: 32, max_steps: 50}\nmodel: {_target_:"
        " nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, torch_dtype: bf16,"
        " pretrained_model_name_or_path: meta-llama/Llama-3.2-1B}\n"
        "distributed: {strategy: fsdp2, tp_size: 1, cp_size: 1, activation_checkpointing: true}\n"
        "peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, dim: 16,"
        " target_modules: '*_proj'}\npacked_sequence: {packed_sequence_size: 1024}\n"
        "optimizer: {_target_: torch.optim.Adam, lr: 1e-5, betas: [0.9, 0.999]}\n"
        "loss_fn: {_target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy}\n"
        "dataset: {_target_: mine, split: train}\ncheckpoint: {enabled: true}\n",
        {"gpus": 8},
        {
            "ctx": 1024,
            "packing": True,
            "bs": 2,
            "grad_accum": 2,
            "method": "lora",
            "rank": 16,
            "alpha": 32,
            "targets": "all-linear",
            "data_parallel": ["fsdp2"],
            "checkpointing": "full",
            "optimizer": "adamw-foreach",
            "loss": "fused",
            "precision": "bf16",
            "sharded_dtype": "bf16",
            "reduce_dtype": "fp32",
        },
        (),
    ),
    "NeMo Automodel, a pipeline": (
        "yaml",
        "step_scheduler: {local_batch_size: 8, global_batch_size: 32}\n"
        "model: {pretrained_model_name_or_path: meta-llama/Llama-3.2-1B, backend: {rms_norm: te}}\n"
        "distributed: {strategy: fsdp2, pp_size: 2, pipeline: {pp_schedule: 1f1b,"
        " pp_microbatch_size: 2, layers_per_stage: 8}}\n",
        {"gpus": 4},
        {
            "pp": 2,
            "bs": 2,
            "grad_accum": 8,
            "pp_schedule": "1f1b",
            "ctx": 2048,
            "stack": "automodel",
        },
        ("step_scheduler.local_batch_size", "distributed.pipeline.layers_per_stage"),
    ),
    "NeMo-RL, GRPO with engines of their own": (
        "yaml",
        "grpo: {num_generations_per_prompt: 16, async_grpo: {enabled: true}}\n"
        "policy: {model_name: Qwen/Qwen2.5-0.5B, max_total_sequence_length: 512,"
        " dtensor_cfg: {enabled: true, tensor_parallel_size: 2}, generation: {backend: vllm,"
        " vllm_cfg: {gpu_memory_utilization: 0.8, tensor_parallel_size: 2}, colocated: {enabled:"
        " false, resources: {gpus_per_node: 4}}}}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n",
        {"gpu": "H100"},
        {
            "workload": "grpo",
            "gpus": 4,
            "tp": 2,
            "rollout_gpus": "4xH100",
            "rollout_memory": 0.8,
            "rollout_tp": 2,
            "rollout_group": 16,
            "rollout_staleness": 1,
        },
        (),
    ),
    "OLMo-core, words of a launch line as a file": (
        "yaml",
        "script: Olmo-2-7B-SFT\ncluster: ai2/jupiter\nseq_len: 8192\nnum_nodes: 2\n"
        "global_batch_size: 524288\ntrain_module.optim.lr: 1e-5\n",
        {},
        {"model": "olmo-2-7b", "gpus": 16, "bs": 2, "ctx": 8192, "grad_accum": 2, "cp": None},
        ("script",),
    ),
    "prime-rl, supervised": (
        "toml",
        "[model]\nname = 'Qwen/Qwen3-0.6B'\n[model.lora]\nrank = 8\n[model.ac]\nfreq = 2\n"
        "[data]\nbatch_size = 32\nmicro_batch_size = 2\nseq_len = 1024\n"
        "[optim]\nlr = 1e-5\n[deployment]\ntype = 'single_node'\nnum_train_gpus = 4\n",
        {},
        {
            "model": "Qwen/Qwen3-0.6B",
            "gpus": 4,
            "bs": 2,
            "ctx": 1024,
            "grad_accum": 4,
            "method": "lora",
            "rank": 8,
            "checkpointing": "interleaved:2",
            "data_parallel": ["fsdp2"],
            "precision": "bf16",
            "sharded_dtype": "fp32",
        },
        ("model.optim_cpu_offload",),
    ),
    "prime-rl, reinforcement": (
        "toml",
        "seq_len = 2048\n[model]\nname = 'Qwen/Qwen3-0.6B'\n[trainer.optim]\nlr = 1e-6\n"
        "[trainer.model]\noptim_cpu_offload = false\n[orchestrator]\nbatch_size = 128\n[inference]\n",
        {},
        {
            "ctx": 2048,
            "bs": 1,
            "gpus": 1,
            "precision": "bf16",
            "data_parallel": ["fsdp2"],
            "sharded_dtype": "fp32",
            "allocator": "expandable_segments:True",
            "checkpointing": "offload",
        },
        ("inference",),
    ),
    "prime-rl, reinforcement of 2025": (
        "toml",
        "inference_gpu_ids = [0, 1]\ntrainer_gpu_ids = [2, 3]\n[model]\nname = 'Qwen/Qwen3-0.6B'\n"
        "[trainer.model.experimental.lora]\nrank = 8\n[orchestrator]\nseq_len = 4096\n",
        {},
        {
            "ctx": 4096,
            "gpus": 2,
            "method": "lora",
            "rank": 8,
            "checkpointing": "none",
            "compile": None,
            "loss": None,
        },
        ("inference",),
    ),
    "prime-rl, reinforcement whose trainer says nothing": (
        "toml",
        "[model]\nname = 'Qwen/Qwen3-0.6B'\n[trainer]\n[orchestrator]\nseq_len = 4096\n",
        {},
        {"ctx": 4096, "gpus": 1, "checkpointing": "offload", "compile": True, "loss": "chunked"},
        ("trainer.model.optim_cpu_offload", "inference"),
    ),
    "NeMo-RL, DTensor": (
        "yaml",
        "sft: {max_num_epochs: 1}\npolicy: {model_name: meta-llama/Llama-3.2-1B,"
        " train_global_batch_size: 64, train_micro_batch_size: 2, max_total_sequence_length: 1024,"
        " precision: bfloat16, dtensor_cfg: {enabled: true, tensor_parallel_size: 2,"
        " activation_checkpointing: true}, sequence_packing: {enabled: true, train_mb_tokens:"
        " '${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}'},"
        " optimizer: {name: torch.optim.AdamW, kwargs: {foreach: false, fused: false}},"
        " megatron_cfg: {enabled: false, tensor_model_parallel_size: 8}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n",
        {},
        {
            "gpus": 8,
            "tp": 2,
            "bs": 2,
            "grad_accum": 8,
            "packing": True,
            "stack": "nemo-rl-dtensor",
            "sharded_dtype": "fp32",
            "sync_each_batch": True,
            "checkpointing": "selective:inputs",
            "optimizer": "adamw",
        },
        (),
    ),
    "NeMo-RL, DTensor before release 0.4": (
        "yaml",
        "sft: {max_num_epochs: 1}\npolicy: {model_name: meta-llama/Llama-3.2-1B,"
        " train_global_batch_size: 8, train_micro_batch_size: 1, max_total_sequence_length: 1024,"
        " precision: bfloat16, fsdp_offload_enabled: false, activation_checkpointing_enabled: false,"
        " dtensor_cfg: {enabled: true, tensor_parallel_size: 1, activation_checkpointing: true},"
        " optimizer: {name: torch.optim.AdamW, kwargs: {foreach: false, fused: false}}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n",
        {},
        {"gpus": 8, "stack": "nemo-rl-dtensor-0.3", "checkpointing": "selective:inputs"},
        ("policy.dtensor_cfg.activation_checkpointing",),
    ),
    "NeMo-RL, a list of teachers": (
        "yaml",
        "distillation: {num_prompts_per_step: 64}\npolicy: {model_name: meta-llama/Llama-3.2-1B,"
        " train_global_batch_size: 64, train_micro_batch_size: 1, max_total_sequence_length: 1024,"
        " precision: bfloat16, dtensor_cfg: {enabled: true}}\n"
        "teacher: null\nteachers: [{model_name: Qwen/Qwen3-4B, weight: 1.0},"
        " {model_name: meta-llama/Llama-3.2-3B}]\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n",
        {},
        {"gpus": 8, "workload": "distill", "teacher": "Qwen/Qwen3-4B", "teacher_topk": None},
        ("policy.generation", "teachers"),
    ),
    "NeMo-RL, a teacher's largest logits": (
        "yaml",
        "distillation: {num_prompts_per_step: 64, topk_logits_k: 32}\n"
        "policy: {model_name: Qwen/Qwen3-1.7B-Base,"
        " train_global_batch_size: 64, train_micro_batch_size: 1, max_total_sequence_length: 1024,"
        " megatron_cfg: {enabled: true, tensor_model_parallel_size: 2,"
        " pipeline_model_parallel_size: 2}}\n"
        "teacher: {model_name: Qwen/Qwen3-4B, megatron_cfg: {enabled: true,"
        " tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n",
        {},
        {"pp": 2, "workload": "distill", "teacher": "Qwen/Qwen3-4B", "teacher_topk": 32},
        ("policy.generation", "teacher.megatron_cfg"),
    ),
    "NeMo-RL, GRPO on Megatron": (
        "yaml",
        "grpo: {num_prompts_per_step: 8}\npolicy: {model_name: meta-llama/Llama-3.2-1B,"
        " train_global_batch_size: 64, train_micro_batch_size: 1, max_total_sequence_length: 512,"
        " megatron_cfg: {enabled: true, tensor_model_parallel_size: 2,"
        " pipeline_model_parallel_size: 2}, generation: {backend: sglang, colocated: {enabled:"
        " false, resources: {gpus_per_node: 4, num_nodes: 1}}}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n",
        {},
        {"gpus": 4, "tp": 2, "pp": 2, "grad_accum": 64, "stack": "nemo-rl", "workload": None},
        ("grpo", "policy.generation"),
    ),
    "llm-foundry, MPT": (
        "yaml",
        "variables: {length: 512}\nmax_seq_len: ${variables.length}\nmodel: {name: mpt_causal_lm,"
        " d_model: 64, n_heads: 4, n_layers: 2, vocab_size: 256, attn_config: {attn_impl: flash}}\n"
        "optimizer: {name: decoupled_adamw}\nalgorithms: {gradient_clipping: {clipping_type: norm,"
        " clipping_threshold: 1.0}}\nglobal_train_batch_size: 64\ndevice_train_microbatch_size: 4\n"
        "precision: amp_bf16\nfsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE,"
        " activation_checkpointing: true, activation_checkpointing_reentrant: false}\n",
        {"gpus": 8},
        {
            "ctx": 512,
            "bs": 4,
            "grad_accum": 2,
            "optimizer": "adamw",
            "clip": True,
            "data_parallel": ["fsdp1"],
            "sharded_dtype": "fp32",
            "reduce_dtype": "bf16",
            "backward_prefetch": False,
            "sync_each_batch": True,
            "checkpointing": "full",
            "reentrant": False,
        },
        (),
    ),
    "llm-foundry, DoRA over GPUs that the file does not count": (
        "yaml",
        "model: {name: hf_causal_lm, pretrained_model_name_or_path: HuggingFaceTB/SmolLM2-135M,"
        " peft_config: {r: 8, use_dora: true, use_rslora: false}}\n"
        "train_loader: {name: text}\nmax_seq_len: 256\nprecision: amp_bf16\n"
        "device_train_microbatch_size: 2\nfsdp_config: {sharding_strategy: FULL_SHARD}\n",
        {},
        # what holds all of the model holds it in fp32, as the shards do
        {"method": "dora", "rank": 8, "precision": "bf16-amp", "data_parallel": None},
        ("sharding",),
    ),
    "llm-foundry, adapters": (
        "yaml",
        "max_seq_len: 256\nmodel: {name: hf_causal_lm, pretrained_model_name_or_path:"
        " meta-llama/Llama-3.2-1B, peft_config: {r: 4, peft_type: LORA, target_modules: [q_proj]}}\n"
        "train_loader: {name: finetuning, dataset: {packing_ratio: auto}}\n"
        "device_train_microbatch_size: auto\n",
        {},
        {"method": "lora", "rank": 4, "targets": ["q_proj"], "packing": True, "bs": 1},
        (),
    ),
    "OLMo, mixed FSDP": (
        "yaml",
        "model: {d_model: 64, n_heads: 4, n_layers: 4, mlp_hidden_size: 256, vocab_size: 250,"
        " embedding_size: 256, weight_tying: false, rope: true, include_bias: false,"
        " attention_dropout: 0.0, residual_dropout: 0.0, embedding_dropout: 0.0, layer_norm_type:"
        " rms, attention_layer_norm: true, norm_after: true, max_sequence_length: 128}\n"
        "optimizer: {name: adamw}\nprecision: amp_bf16\nfsdp: {wrapping_strategy: by_block,"
        " precision: mixed}\nglobal_train_batch_size: 64\ndevice_train_microbatch_size: 2\n"
        "activation_checkpointing: one_in_four\nmax_grad_norm: 1.0\n",
        {"gpus": 8},
        {
            "ctx": 128,
            "bs": 2,
            "grad_accum": 4,
            "checkpointing": "interleaved:4",
            "data_parallel": ["fsdp1"],
            "reduce_dtype": "fp32",
            "sync_each_batch": True,
            "precision": "bf16",
        },
        (),
    ),
    "open-instruct, QLoRA": (
        "yaml",
        "model_name_or_path: allenai/OLMo-2-0425-1B\nmax_seq_length: 512\nwith_tracking: true\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nuse_lora: true\n"
        "use_qlora: true\nlora_rank: 8\nlearning_rate: 2.0e-05\n",
        {},
        {
            "quant": "nf4",
            "double_quant": True,
            "rank": 8,
            "checkpointing": "none",
            "optimizer": "paged-adamw",
            "bs": 2,
        },
        (),
    ),
    "open-instruct, preferences": (
        "yaml",
        "model_name_or_path: allenai/OLMo-2-0425-1B\nmax_seq_length: 512\nwith_tracking: true\n"
        "per_device_train_batch_size: 1\nloss_type: dpo_norm\nbeta: 5\n",
        {},
        {"workload": "dpo", "reference": False, "optimizer": "adamw-fused"},
        (),
    ),
    "slime, a policy beside SGLang": (
        "sh",
        "ARGS=(--hf-checkpoint /root/Qwen3-0.6B-FP8 --num-layers 28 --hidden-size 1024"
        " --tensor-model-parallel-size 2 --sequence-parallel\n)\nMORE=(--use-dynamic-batch-size"
        " --max-tokens-per-gpu 4096 --rollout-max-response-len 1024 --global-batch-size 64"
        " --recompute-granularity full --rollout-num-gpus-per-engine 2 --advantage-estimator grpo"
        " --rollout-temperature 0.8 --entropy-coef 0.00)\n"
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 ${ARGS[@]} ${MORE[@]}\n",
        {},
        {
            "model": "Qwen3-0.6B",
            "gpus": 8,
            "tp": 2,
            "sequence_parallel": True,
            "bs": 4,
            "ctx": 1024,
            "grad_accum": 4,
            "checkpointing": "full",
            "data_parallel": ["zero1"],
            "stack": "slime",
        },
        (
            *("use_dynamic_batch_size", "rollout_num_gpus_per_engine", "advantage_estimator"),
            "rollout_temperature",
        ),
    ),
    "Megatron-Bridge, over a recipe": (
        "yaml",
        "model: {seq_length: 512, tensor_model_parallel_size: 2, context_parallel_size: 1}\n"
        "train: {train_iters: 10, global_batch_size: 8, micro_batch_size: 1}\n"
        "ddp: {grad_reduce_in_fp32: false}\n",
        {"model": "llama-3.2-1b", "gpus": 4},
        {"tp": 2, "ctx": 512, "grad_accum": 4, "stack": "nemo", "reduce_dtype": "bf16"},
        (),
    ),
    # bf16_mixed sums in fp32 (training/mixed_precision.py); it was priced as bf16's
    "Megatron-Bridge, as its recipes sum": (
        "yaml",
        "model: {seq_length: 512}\ntrain: {micro_batch_size: 1}\n",
        {"model": "llama-3.2-1b"},
        {"ctx": 512, "precision": "bf16", "stack": "nemo", "reduce_dtype": "fp32"},
        (),
    ),
    "Megatron-SWIFT, adapters": (
        "yaml",
        "model: Qwen/Qwen3-0.6B\ntuner_type: lora\nlora_rank: 4\ntensor_model_parallel_size: 2\n"
        "sequence_parallel: true\nmicro_batch_size: 2\nglobal_batch_size: 16\nmax_length: 256\n"
        "packing: true\nrecompute_granularity: full\nrecompute_method: uniform\n"
        "recompute_num_layers: 1\nlr: 1e-4\nmoe_permute_fusion: true\n",
        {"gpus": 4},
        {
            "method": "lora",
            "rank": 4,
            "targets": "all-linear",
            "tp": 2,
            "grad_accum": 4,
            "checkpointing": "full",
            "data_parallel": ["zero1"],
            "reduce_dtype": "bf16",
        },
        (),
    ),
    "Megatron-LM, T5": (
        "yaml",
        "MODEL_ARGS:\n  --encoder-num-layers: 2\n  --decoder-num-layers: 2\n  --hidden-size: 64\n"
        "  --num-attention-heads: 4\n  --encoder-seq-length: 128\n  --decoder-seq-length: 64\n"
        "  --micro-batch-size: 2\n  --global-batch-size: 8\n",
        {},
        {"ctx": 128, "target_ctx": 64, "bs": 2, "grad_accum": 4},
        ("encoder_num_layers",),
    ),
    "Megatron-LM, experts over tensor ranks": (
        "sh",
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64"
        " --num-attention-heads 4 --num-experts 8 --swiglu --seq-length 64 --micro-batch-size 1"
        " --tensor-model-parallel-size 4 --expert-model-parallel-size 8 --bf16\n",
        {},
        {"tp": 4, "ep": 2, "gpus": 8},
        ("expert_model_parallel_size",),
    ),
    "Megatron-LM, an expert on one tensor rank": (
        "sh",
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64"
        " --num-attention-heads 4 --num-experts 8 --swiglu --seq-length 64 --micro-batch-size 1"
        " --tensor-model-parallel-size 4 --expert-model-parallel-size 8 --bf16"
        " --expert-tensor-parallel-size 1 --sequence-parallel\n",
        {},
        {"tp": 4, "ep": 8, "etp": 1, "gpus": 8},
        (),
    ),
}
# kind of job -> (ending, text, option that is the way out, its value)
REFUSED: dict[str, tuple[str, str, str, object]] = {
    "torchtitan, a debug model": ("toml", TITAN.replace("8B", "debugmodel"), "model", "llama-7b"),
    "torchtitan, another optimizer": (
        "toml",
        TITAN + "[optimizer]\nname = 'Shampoo'\n",
        "optimizer",
        "adamw",
    ),
    "torchtune, another model": (
        "yaml",
        "model:\n  _component_: mine.models.best\n",
        "model",
        "llama-7b",
    ),
    "torchtune, another optimizer": (
        "yaml",
        "model:\n  _component_: torchtune.models.llama2.llama2_7b\noptimizer:\n"
        "  _component_: mine.Best\n",
        "optimizer",
        "adamw",
    ),
    "LLaMA-Factory, another stage": (
        "yaml",
        "model_name_or_path: llama-7b\nstage: best\ncutoff_len: 64\n",
        "workload",
        "sft",
    ),
    "litgpt, all GPUs of nobody knows what": (
        "yaml",
        "model_name: tiny-llama-1.1b\ndevices: auto\ntrain:\n  micro_batch_size: 4\n",
        "gpus",
        8,
    ),
    "ms-swift, another tuner": (
        "yaml",
        "model: Qwen/Qwen2.5-0.5B-Instruct\ntuner_type: longlora\n",
        "method",
        "lora",
    ),
    "verl, another estimator": (
        "yaml",
        "algorithm.adv_estimator: best\nactor_rollout_ref.model.path: llama-7b\n",
        "workload",
        "sft",
    ),
    "gpt-neox, layers that are no attention": (
        "yaml",
        "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nattention_config: [[[rwkv], 2]]\n",
        "model",
        "llama-7b",
    ),
    "nanotron, another family": (
        "yaml",
        "tokens: {sequence_length: 64}\n"
        "model: {model_config: {is_best_config: true, hidden_size: 64}}\n",
        "model",
        "llama-7b",
    ),
    "oumi, another trainer": (
        "yaml",
        "model: {model_name: llama-7b}\ntraining: {trainer_type: BEST}\n",
        "workload",
        "sft",
    ),
    "OpenRLHF, another estimator": (
        "yaml",
        "actor.model_name_or_path: llama-7b\nalgo.advantage.estimator: best\n",
        "workload",
        "sft",
    ),
    "NeMo Automodel, another optimizer": (
        "yaml",
        "step_scheduler: {local_batch_size: 8}\nmodel: {pretrained_model_name_or_path: llama-7b}\n"
        "optimizer: {_target_: mine.Best}\n",
        "optimizer",
        "adamw",
    ),
    "Megatron-Bridge, without a model": (
        "yaml",
        "model: {seq_length: 64}\ntrain: {global_batch_size: 8, micro_batch_size: 1}\n",
        "model",
        "llama-7b",
    ),
    "slime, a checkpoint of nobody knows what": (
        "sh",
        "A=(--hf-checkpoint $CKPT --num-layers 2 --micro-batch-size 1)\n",
        "model",
        "llama-7b",
    ),
    "llm-foundry, another model": (
        "yaml",
        "max_seq_len: 64\nmodel: {name: mine}\ntrain_loader: {name: text}\n",
        "model",
        "llama-7b",
    ),
    "NeMo-RL, another optimizer": (
        "yaml",
        "sft: {seed: 1}\npolicy: {model_name: llama-7b, optimizer: {name: mine.Best}}\n",
        "optimizer",
        "adamw",
    ),
    "prime-rl, another optimizer": (
        "toml",
        "[model]\nname = 'llama-7b'\n[data]\nbatch_size = 8\n[optim]\ntype = 'best'\n",
        "optimizer",
        "adamw",
    ),
}


def written(tmp_path: Path, ending: str, text: str) -> str:
    if ending == "toml" and sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    job = tmp_path / f"job.{ending}"
    job.write_text(text, encoding="utf-8")
    return str(job)


@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_its_options(name: str, tmp_path: Path) -> None:
    ending, text, flags, expected, named = CASES[name]
    notes: list[str] = []
    options = with_job_file({**flags, "job": written(tmp_path, ending, text)}, notes)
    assert {key: options.get(key) for key in expected} == expected
    keys = options["job_keys"]
    assert isinstance(keys, JobKeys) and not keys.of(KeyUse.UNKNOWN)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == list(named)
    assert priced(options, notes)[0].num_trained


def test_the_length_of_a_rollout_is_assumed_once(tmp_path: Path) -> None:
    """ms-swift's GRPO without max_length said two lengths for one."""
    ending, text, *_ = CASES["ms-swift 3, by its older word for a tuner"]
    notes: list[str] = []
    with_job_file({"job": written(tmp_path, ending, text)}, notes)
    assert sum("ctx not given" in note for note in notes) == 1


def test_the_type_of_quantized_products_is_read(tmp_path: Path) -> None:
    text = "model_name_or_path: gpt2\nuse_peft: true\nload_in_4bit: true\nbf16: false\n"
    path = written(tmp_path, "yaml", f"{text}bnb_4bit_compute_dtype: bfloat16\n")
    assert with_job_file({"job": path}, [])["quant_compute_dtype"] == "bf16"


def test_an_engine_without_room_leaves_the_policy_alone(tmp_path: Path) -> None:
    """Weights of 14.2 GiB do not go into half of 24 GB; a flag that cannot be is refused."""
    text = (
        "algorithm.adv_estimator: grpo\nactor_rollout_ref.model.path: Qwen/Qwen2.5-7B-Instruct\n"
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 1\ntrainer.n_gpus_per_node: 1\n"
        "actor_rollout_ref.rollout.tensor_model_parallel_size: 1\n"
    )
    flags: dict[str, object] = {"job": written(tmp_path, "yaml", text), "gpu": "RTX 4090"}
    e = priced(with_job_file(flags, []), [])[0]
    assert e.job_keys is not None and e.config.workload.is_plain
    (key,) = e.job_keys.of(KeyUse.NOT_PRICED)
    assert key.name == "actor_rollout_ref.rollout" and "--rollout-memory 0.65" in key.why
    given = with_job_file({**flags, "rollout": "vllm", "rollout_memory": 0.3}, [])
    with pytest.raises(InputError, match="--rollout-memory"):
        _ = priced(given, [])[0].memory


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_a_way_out_that_works(name: str, tmp_path: Path) -> None:
    ending, text, option, value = REFUSED[name]
    job = written(tmp_path, ending, text)
    with pytest.raises(InputError, match=f"add --{option}") as refused:
        with_job_file({"job": job}, [])
    assert "\n" not in str(refused.value)
    assert with_job_file({"job": job, option: value}, [])[option] == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: object_detection\nbase_model: vit-base\ndata: {path: a}\n", "AutoTrain"),
        ("model: a/b\nrollouts_per_example: 8\nenv: [{id: a}]\n", "Prime Intellect hosts"),
        ("rollouts_per_example: 8\nsampling: {max_tokens: 9}\n", "orchestrator"),
        ("base_model: llama-7b\nwidth: 1\nlr_max: 2\nmy_length: 9\ngroups: 3\n", "my_length"),
    ],
)
def test_a_file_of_another_training_is_not_read_as_one_of_a_tool(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said) as refused:
        with_job_file({"job": written(tmp_path, "yaml", text)}, [])
    assert "give " in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", MORE_TRAINERS)
def test_every_trainer_has_a_case(kind: str) -> None:
    assert any(case.startswith(f"{MORE_TRAINERS[kind].tool},") for case in CASES)


def test_a_file_builds_on_the_files_it_names(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "sft: {seed: 1}\npolicy: {model_name: llama-7b, train_micro_batch_size: 4,"
        " max_total_sequence_length: 512, dtensor_cfg: {enabled: true}}\n"
    )
    (tmp_path / "inner").mkdir()
    job = tmp_path / "inner" / "job.yaml"
    job.write_text("defaults: ../base.yaml\npolicy: {model_name: llama-13b}\n")
    options = with_job_file({"job": str(job)}, [])
    assert (options["model"], options["bs"], options["ctx"]) == ("llama-13b", 4, 512)
    (tmp_path / "base.yaml").unlink()
    with pytest.raises(InputError, match=r"builds on '../base.yaml', which is not there"):
        read_job(str(job), [])


def test_files_that_build_on_one_another_end(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("defaults: job.yaml\npolicy: {model_name: llama-7b}\n")
    with pytest.raises(InputError, match="name one another"):
        read_job(str(job), [])


def test_values_that_name_other_keys(tmp_path: Path) -> None:
    from napkinmath.inputs.interpolation import interpolated

    flat = {
        "a.b": 3,
        "a.c": "${.b}",
        "a.d.e": "${..c}",
        "f": "${mul:${a.b}, ${add:${a.c}, 1}}",
        "g": "${div:${f}, 8}",
        "h": "${a.b} of ${f}",
        "i": "${i}",
        "j": "${mul:${nobody}, 2}",
    }
    found = interpolated(flat)
    assert {k: found[k] for k in ("a.c", "a.d.e", "f", "g")} == {
        "a.c": 3,
        "a.d.e": 3,
        "f": 12,
        "g": 1.5,
    }
    assert all(found[key] == flat[key] for key in ("h", "i", "j"))


def test_toml_needs_tomli_on_an_old_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.toml"
    job.write_text(TITAN)
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"pip install tomli, or write it as \.json"):
        read_job(str(job), [])


@pytest.mark.parametrize("text", ["a = ", "a = " + "[" * 4000, "=", "a.b = 1\na = 2\n"])
def test_broken_toml_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"TOML|nested too deeply") as refused:
        read_job(written(tmp_path, "toml", text), [])
    assert "\n" not in str(refused.value)


def test_automodels_models_are_built_from_sizes(tmp_path: Path) -> None:
    """`from_config` with a transformers config, and Automodel's own GPT-2."""
    recipe = "step_scheduler: {local_batch_size: 2}\ndataset: {seq_len: 256}\nmodel:\n"
    sizes = (
        "  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config\n"
        "  config: {_target_: transformers.models.qwen3.configuration_qwen3.Qwen3Config,"
        " hidden_size: 512, num_hidden_layers: 3}\n"
    )
    own = "  _target_: nemo_automodel.components.models.gpt2.build_gpt2_model\n  n_layer: 5\n"
    found: list[dict[str, object]] = []
    for text in (sizes, own):
        file = tmp_path / "recipe.yaml"
        file.write_text(recipe + text)
        found.append(values.mapping(read_job(str(file), [])["config"], "config"))
    assert found[0] == {"hidden_size": 512, "num_hidden_layers": 3, "model_type": "qwen3"}
    assert (found[1]["model_type"], found[1]["n_layer"], found[1]["n_embd"]) == ("gpt2", 5, 768)


def test_torchtunes_grpo_is_sharded_without_a_header(tmp_path: Path) -> None:
    """Its recipe is distributed alone; one GPU was priced without a word (32B: 367 GiB)."""
    text = (
        "model: {_component_: torchtune.models.qwen3.qwen3_4b_instruct}\nbatch_size: 1\n"
        "tokenizer: {max_seq_len: 128}\nmax_generated_tokens: 64\n"
        "loss: {_component_: torchtune.dev.rl.loss.GRPOSimpleLoss}\n"
        "optimizer: {_component_: torch.optim.AdamW}\n"
    )
    notes: list[str] = []
    options = with_job_file({"job": written(tmp_path, "yaml", text)}, notes)
    assert any("does not say how many" in note for note in notes)
    options = with_job_file({"job": written(tmp_path, "yaml", text), "gpus": "8"}, notes)
    assert options["data_parallel"] == ["fsdp2"] and options["workload"] == "grpo"


@pytest.mark.parametrize("key", ["", "data_parallel_shard_dim: -1\n", "fsdp_cpu_offload: false\n"])
def test_torchtune_on_several_gpus_is_fsdp2_without_a_header(tmp_path: Path, key: str) -> None:
    """It has no recipe that replicates alone, and only its FSDP recipes read such keys; DDP was
    priced."""
    text = (
        "model: {_component_: torchtune.models.qwen2_5.qwen2_5_3b}\nbatch_size: 1\n"
        f"tokenizer: {{max_seq_len: 512}}\n{key}dtype: bf16\n"
        "optimizer: {_component_: torch.optim.AdamW, fused: true}\n"
    )
    file = written(tmp_path, "yaml", text)
    options = with_job_file({"job": file, "gpus": "4"}, [])
    assert options["data_parallel"] == ["fsdp2"] and options["sync_each_batch"] is True
    assert ("data_parallel" in read_job(file, [])) is bool(key)


def test_torchtunes_reference_is_sharded_by_layers(tmp_path: Path) -> None:
    """recipes/dev/grpo_full_finetune_distributed.py: TRL's reference is one unit, which is gathered
    whole; torchtune's is not, and its policy stays gathered."""
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "# tune run --nproc_per_node 4 dev/grpo_full_finetune_distributed\n"
        "model: {_component_: torchtune.models.qwen2_5.qwen2_5_3b}\n"
        "tokenizer: {max_seq_len: 512}\nbatch_size: 1\ngrpo_samples: 4\nmax_generated_tokens: 64\n"
        "loss: {_component_: torchtune.dev.rl.loss.GRPOSimpleLoss}\ndtype: bf16\n"
        "optimizer: {_component_: torch.optim.AdamW, lr: 1e-5}\n"
    )
    options = read_job(str(file), [])
    assert (options["reference_at"], options["sharding"]) == ("sharded", "grad-op")


def test_a_family_of_the_gui_without_rules_is_refused(tmp_path: Path) -> None:
    """A LoRA of Lumina was priced as one of Stable Diffusion 1.5."""
    text = (
        '{"LoRA_type": "Standard", "lumina_checkbox": true, "train_batch_size": 1, "network_dim": 8,'
        ' "max_resolution": "64,64"}'
    )
    with pytest.raises(InputError, match="lumina_train_network"):
        with_job_file({"job": written(tmp_path, "json", text)}, [])


def test_gpus_of_a_prime_rl_trainer_are_a_list(tmp_path: Path) -> None:
    text = 'trainer_gpu_ids = "all"\n[trainer.model]\nname = "llama-3.2-1b"\n[orchestrator]\n'
    with pytest.raises(InputError, match="trainer_gpu_ids 'all' is no list"):
        with_job_file({"job": written(tmp_path, "toml", text)}, [])
