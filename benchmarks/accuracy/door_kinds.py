"""Kinds of configurations that `doors.py` draws seldom or never: rollouts, experts, pipelines, other
offloading, images, sounds and denoisers, each with the flags that it has alone. One line each, as a
job file has them."""

from __future__ import annotations

import json
from typing import Any

_LINES = """
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "workload": "grpo", "completion": 32, "rollout": "vllm", "gpu": "L4"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 2, "workload": "grpo", "completion": 32, "rollout": "sglang", "rollout_trainer": "verl", "gpu": "MI300X"}
{"model": "gpt2", "ctx": 128, "bs": 2, "workload": "ppo", "completion": 32, "teacher": "gpt2", "gpu": "V100"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 2, "workload": "rloo", "completion": 16, "score_bs": 2, "gpu": "rtx3060"}
{"model": "gpt2", "ctx": 128, "bs": 2, "workload": "distill", "teacher": "gpt2", "gpu": "rtx3060"}
{"model": "gpt2", "ctx": 128, "bs": 2, "workload": "dpo", "method": "lora", "reference": false, "gpu": "V100"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "workload": "kto", "gpu": "A100-40"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 1, "workload": "orpo", "gpu": "rtx3060"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "workload": "simpo", "gpu": "H100"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "workload": "prm", "gpu": "rtx3060"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "workload": "contrastive", "columns": 3, "gpu": "MI300X"}
{"model": "gpt2", "ctx": 128, "bs": 1, "workload": "contrastive-cached", "gpu": "A100-40"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "offload": "optimizer,parameters", "gpu": "MI300X"}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 1, "offload": "checkpoints", "checkpointing": "full", "gpu": "H100"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "offload": "activations", "offload_style": "torchtune", "gpu": "T4"}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 1, "blocks_to_swap": 2, "gpu": "A100-40"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "mlp_tiles": 4, "gpu": "B200"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "mlp_tiles": "auto", "gpu": "L4"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "kernels": "napkinmath", "method": "qlora", "quant_embeddings": "int8", "gpu": "B200"}
{"model": "gpt2", "ctx": 128, "bs": 1, "kernels": "unsloth", "method": "qlora", "gpu": "MI300X"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "method": "prompt", "virtual_tokens": 8, "gpu": "H100"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "method": "prefix", "checkpointing": "none", "gpu": "B200"}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 1, "method": "lora", "train_modules": "lm_head", "rslora": true, "gpu": "MI300X"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "method": "lora", "adapters": 3, "gpu": "T4"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "method": "lora", "merge": true, "gpu": "A100-40"}
{"model": "gpt2", "ctx": 128, "bs": 1, "quantize_experts": true, "method": "qlora", "gpu": "MI300X"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 2, "power_limit": "300", "gpu": "H100"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "mig": "3g.40gb", "gpu": "A100-80"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "host": "cores=32,memory=200GB/s", "offload": "optimizer", "gpu": "B200"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "samples": 1000, "epochs": 2, "gpu": "V100"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "samples_per_s_per_worker": "50", "dataloader_workers": 4, "gpu": "H100"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "max_steps": 50, "gpu": "A100-40"}
{"model": "gpt2", "ctx": 128, "bs": 2, "eval": true, "gpu": "B200"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "generate": 16, "gpu": "H100"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "target_ctx": 32, "gpu": "B200"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "freeze": "embed_tokens", "gpu": "H100"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 2, "checkpointing": "every:2", "gpu": "A100-40"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "checkpointing": "sqrt", "gpu": "B200"}
{"model": "gpt2", "ctx": 128, "bs": 2, "checkpointing": "offload", "gpu": "A100-40"}
{"model": "gpt2", "ctx": 128, "bs": 2, "checkpointing": "interleaved:2", "gpu": "rtx3060"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "reentrant": true, "checkpointing": "full", "gpu": "MI300X"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "optimizer": "galore", "gpu": "V100"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "optimizer": "muon", "gpu": "rtx4090"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "optimizer": "paged-adamw-8bit", "gpu": "rtx3060"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 1, "precision": "fp8-block", "gpu": "rtx3060"}
{"model": "gpt2", "ctx": 128, "bs": 1, "precision": "tf32", "gpu": "L4"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "stack": "megatron", "gpu": "rtx4090"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "stack": "nanotron", "gpu": "A100-40"}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 1, "stack": "nemo", "gpu": "T4"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "stack": "litgpt", "gpu": "B200"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "double_quant": false, "method": "qlora", "gpu": "L4"}
{"model": "gpt2", "ctx": 128, "bs": 2, "quant": "gptq-int4", "method": "lora", "gpu": "MI300X"}
{"model": "gpt2", "ctx": 128, "bs": 1, "quant": "mxfp4", "method": "lora", "gpu": "rtx3060"}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 2, "quant_compute_dtype": "fp16", "method": "qlora", "gpu": "A100-40"}
{"model": "gpt2", "ctx": 128, "bs": 1, "kbit": false, "method": "qlora", "gpu": "L4"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 2, "keep_modules": "lm_head,q_proj", "method": "qlora", "gpu": "B200"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "rollout_memory": 0.4, "rollout": "vllm", "workload": "grpo", "completion": 32, "gpu": "rtx3060"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "rollout": "vllm", "workload": "grpo", "completion": 32, "rollout_gpus": "2xH100", "rollout_staleness": 1, "gpu": "H100"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "rollout": "vllm", "workload": "grpo", "completion": 32, "rollout_group": 8, "rollout_draft": "3:0.7", "gpu": "T4"}
{"model": "gpt2", "ctx": 128, "bs": 2, "old_logprobs": true, "workload": "grpo", "completion": 16, "gpu": "B200"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "expert_capacity": 1.25, "gpu": "V100"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "lora_dropout": 0.1, "method": "lora", "gpu": "H100"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "adapter_dtype": "fp32", "method": "lora", "gpu": "H100"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": "1k", "bs": "2", "gpu": "T4"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "allow_stale_calibration": true, "gpu": "L4"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 1, "gpus": "4xH100", "pp": 2, "micro_batches": 8, "pp_schedule": "zero-bubble"}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 2, "gpus": "4xH100", "pp": 2, "pp_chunks": 2, "micro_batches": 4}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "gpus": "8xH100", "tp": 2, "pp": 2, "micro_batches": 4}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "gpus": "4xH100", "ep": 2}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "gpus": "4xH100", "ep": 2, "tp": 2, "etp": 1}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "gpus": "4xH100", "ep": 4, "expert_imbalance": 1.5}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "gpus": "4xH100", "ep": 2, "deepep": true, "stack": "megatron"}
{"model": "gpt2", "ctx": 128, "bs": 1, "gpus": "16xH100", "nodes": 2, "network": "400", "data_parallel": "fsdp2"}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 1, "gpus": "4xH100", "cp": 2, "cp_kind": "ulysses"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 2, "gpus": "4xH100", "zero": 2, "offload": "optimizer"}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 1, "gpus": "4xH100", "zero": 3, "offload": "optimizer,parameters", "nvme": "optimizer"}
{"model": "gpt2", "ctx": 128, "bs": 1, "gpus": "4xH100", "data_parallel": "fsdp1", "wrap": "layer", "forward_prefetch": true, "limit_all_gathers": false}
{"model": "gpt2", "ctx": 128, "bs": 2, "gpus": "4xL4", "bucket_mb": 50, "bucket_view": true}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "gpus": "4xH100", "data_parallel": "fsdp2", "reshard": false, "sharded_dtype": "fp32", "reduce_dtype": "bf16"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 2, "gpus": "2xH100", "host_ram": "512GiB", "zero": 1}
{"model": "qwen2.5-0.5b", "ctx": 128, "bs": 2, "gpus": "4xH100", "sync_each_batch": true, "grad_accum": 2, "data_parallel": "fsdp2"}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 1, "gpus": "4xH100", "global_batch": 16, "tp": 2, "sequence_parallel": false}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "gpus": "4xH100", "pp": 4, "pp_schedule": "dualpipe-v", "micro_batches": 8}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 1, "gpus": "2xMI300X", "data_parallel": "ddp"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "method": "lora", "gpus": "4xH100", "pp": 2, "micro_batches": 8, "pp_schedule": "zero-bubble", "workload": "grpo", "completion": 16, "rollout": "vllm"}
{"arch": "L4 h512 a8 kv2 f1408 v32000", "ctx": 128, "bs": 1, "method": "lora", "gpus": "4xH100", "pp": 2, "pp_chunks": 2, "micro_batches": 4, "workload": "grpo", "completion": 16, "rollout": "vllm"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 1, "method": "lora", "gpus": "8xH100", "tp": 2, "pp": 2, "micro_batches": 4, "workload": "grpo", "completion": 16, "rollout": "vllm"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "method": "lora", "gpus": "4xH100", "ep": 2, "workload": "grpo", "completion": 16, "rollout": "vllm"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "method": "lora", "gpus": "4xH100", "ep": 2, "tp": 2, "etp": 1, "workload": "grpo", "completion": 16, "rollout": "vllm"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "method": "lora", "gpus": "4xH100", "ep": 4, "expert_imbalance": 1.5, "workload": "grpo", "completion": 16, "rollout": "vllm"}
{"arch": "L2 h64 a4 kv2 f128 v256 moe4x2", "ctx": 64, "bs": 1, "method": "lora", "gpus": "4xH100", "ep": 2, "deepep": true, "stack": "megatron", "workload": "grpo", "completion": 16, "rollout": "vllm"}
{"arch": "L2 h64 a4 kv2 f128 v256", "ctx": 64, "bs": 1, "method": "lora", "gpus": "16xH100", "nodes": 2, "network": "400", "data_parallel": "fsdp2", "workload": "grpo", "completion": 16, "rollout": "vllm"}
{"model": "qwen2.5-vl-3b", "image": "448x448", "ctx": 512, "method": "lora", "bs": 1, "gpu": "H100"}
{"model": "sdxl", "image": "512x512", "method": "lora", "bs": 1, "gpu": "H100"}
{"model": "wan2.1-t2v-1.3b", "frames": 5, "method": "lora", "bs": 1, "gpu": "H100"}
{"model": "flux.1-dev", "method": "lora", "blocks_to_swap": 10, "resident": "vae", "image": "512x512", "bs": 1, "gpu": "H100"}
{"model": "wav2vec2-base-960h", "audio": "5", "bs": 1, "gpu": "H100"}
{"model": "whisper-tiny", "audio": "10", "method": "lora", "bs": 1, "gpu": "H100"}
{"model": "vit-base", "image": "384x384", "bs": 1, "gpu": "rtx4090"}
{"model": "resnet-50", "image": "256x256", "bs": 1, "gpu": "rtx4090"}
{"model": "bert-base-uncased", "task": "token-classification", "ctx": 64, "bs": 1, "gpu": "rtx4090"}
{"model": "gpt2", "task": "sequence-classification", "ctx": 64, "bs": 1, "gpu": "rtx4090"}
{"model": "electra-small", "task": "masked-lm", "ctx": 64, "bs": 1, "gpu": "rtx4090"}
"""

KINDS: tuple[dict[str, Any], ...] = tuple(json.loads(line) for line in _LINES.split("\n") if line)
