"""Files of trainers that generate what they train on: how long a sequence is, which forwards a step
has beside the update, and what of them is named. Each expectation is read in the tool's source."""

from __future__ import annotations

from pathlib import Path

import pytest
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import with_job_file
from napkinmath.ir.ledger import Phase

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_TRL = f"model_name_or_path: {_MODEL}\nnum_generations: 4\n"
_AXOLOTL = f"base_model: {_MODEL}\nsequence_len: 4096\nrl: grpo\n"
_OUMI = (
    f"model: {{model_name: {_MODEL}, model_max_length: 8192}}\ntraining: {{trainer_type: TRL_GRPO"
)
_SWIFT = f"model: {_MODEL}\ntuner_type: lora\nrlhf_type: "
_VERL = (
    f"algorithm.adv_estimator: grpo\nactor_rollout_ref.model.path: {_MODEL}\n"
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 4\n"
    "actor_rollout_ref.model.use_remove_padding: false\n"
)
_TUNE = (
    "model: {_component_: torchtune.models.qwen2_5.qwen2_5_0_5b}\nbatch_size: 2\n"
    "tokenizer: {max_seq_len: 256}\ngradient_accumulation_steps: 1\nmax_generated_tokens: 64\n"
    "optimizer: {_component_: torch.optim.AdamW}\n"
)
# text, flags beside it, options it becomes, keys that are named
Case = tuple[str, dict[str, object], dict[str, object], set[str]]
CASES: dict[str, Case] = {
    "TRL, what a model may take is no sequence": (
        _TRL + "max_length: 4096\nmax_prompt_length: 100\nmax_completion_length: 28\n",
        {},
        {"ctx": 128, "completion": 28, "old_logprobs": None},
        set(),
    ),
    "TRL with an engine scores what it generated": (
        _TRL + "use_vllm: true\n",
        {},
        {"ctx": 1024, "old_logprobs": True},
        {"use_vllm"},
    ),
    "TRL without the correction of an engine": (
        _TRL + "use_vllm: true\nvllm_importance_sampling_correction: false\n",
        {},
        {"old_logprobs": None},
        {"use_vllm"},
    ),
    "TRL, two updates on one rollout": (
        _TRL + "num_iterations: 2\n",
        {},
        {"old_logprobs": True},
        {"num_iterations"},
    ),
    "TRL's PPO": (
        f"model_name_or_path: {_MODEL}\nresponse_length: 100\nnum_ppo_epochs: 1\n",
        {},
        {"workload": "ppo", "ctx": 612, "completion": 100},
        set(),
    ),
    "TRL's PPO updates four times": (
        f"model_name_or_path: {_MODEL}\nkl_coef: 0.1\n",
        {},
        {"workload": "ppo", "ctx": 565, "completion": 53},
        {"num_ppo_epochs"},
    ),
    "axolotl, without beta": (
        _AXOLOTL + "trl: {max_completion_length: 1024}\n",
        {},
        {"ctx": 1536, "completion": 1024, "reference": False, "old_logprobs": None},
        set(),
    ),
    "axolotl, an engine with a limit": (
        _AXOLOTL + "trl: {max_completion_length: 1024, beta: 0.01, use_vllm: true,"
        " vllm_mode: server}\nvllm: {max_model_len: 1200}\n",
        {},
        {"ctx": 1200, "reference": True, "old_logprobs": True},
        {"trl.use_vllm"},
    ),
    "axolotl, an engine on the policy's GPU": (
        _AXOLOTL + "trl: {use_vllm: true, vllm_mode: colocate, num_generations: 4}\n"
        "vllm: {gpu_memory_utilization: 0.25}\n",
        {"gpu": "h100"},
        {"rollout": "vllm", "rollout_trainer": "trl", "rollout_memory": 0.25, "rollout_group": 4},
        set(),
    ),
    "axolotl's DPO reads sequence_len": (
        f"base_model: {_MODEL}\nsequence_len: 4096\nrl: dpo\ntrl: {{max_completion_length: 64}}\n",
        {},
        {"ctx": 4096, "workload": "dpo", "completion": None},
        set(),
    ),
    "oumi": (
        _OUMI + ", grpo: {max_completion_length: 256}}\n",
        {},
        {"ctx": 768, "completion": 256, "reference": False},
        set(),
    ),
    "oumi with more of TRL's arguments": (
        _OUMI + ", grpo: {max_prompt_length: 100, use_vllm: true}, trainer_kwargs: {beta: 0.04}}\n",
        {},
        {"ctx": 612, "reference": True, "old_logprobs": True},
        {"training.grpo.use_vllm"},
    ),
    "ms-swift cuts prompts": (
        _SWIFT + "grpo\nmax_length: 2048\nmax_completion_length: 1024\n",
        {},
        {"ctx": 3072, "completion": 1024, "old_logprobs": True},
        set(),
    ),
    "ms-swift's completions of a prompt are counted one by one": (
        _SWIFT + "grpo\nmax_length: 2048\nnum_generations: 4\n",
        {},
        {"workload": "grpo", "rollout": None},
        set(),
    ),
    "ms-swift, where the engine's longest sequence ends": (
        _SWIFT + "grpo\nmax_length: 2048\nmax_completion_length: 4096\nuse_vllm: true\n"
        "vllm_mode: colocate\nvllm_max_model_len: 3072\nvllm_enable_lora: true\n",
        {},
        {"ctx": 3072, "completion": 1536},
        {"use_vllm", "vllm_enable_lora"},
    ),
    "ms-swift, the longest completion behind a shorter prompt": (
        _SWIFT + "grpo\nmax_length: 12000\nmax_completion_length: 8192\nuse_vllm: true\n"
        "vllm_mode: colocate\nvllm_max_model_len: 16384\n",
        {},
        {"ctx": 16384, "completion": 8192},
        {"use_vllm"},
    ),
    "ms-swift, a server's limit is its own": (
        _SWIFT + "grpo\nmax_length: 2048\nmax_completion_length: 4096\nuse_vllm: true\n"
        "vllm_mode: server\nvllm_max_model_len: 3072\n",
        {},
        {"ctx": 6144, "completion": 4096},
        {"use_vllm"},
    ),
    "ms-swift's plugins make rewards of rollouts": (
        _SWIFT + "grpo\nexternal_plugins: rewards.py\n",
        {},
        {"workload": "grpo"},
        set(),
    ),
    "ms-swift's plugins change what else is trained": (
        _SWIFT + "dpo\nexternal_plugins: trainer.py\n",
        {},
        {"workload": "dpo"},
        {"external_plugins"},
    ),
    "ms-swift's DPO without padding": (
        _SWIFT + "dpo\nmax_length: 2048\npadding_free: true\n",
        {},
        {"ctx": 2048},
        {"padding_free"},
    ),
    "ms-swift's DPO without padding, with the mean length": (
        _SWIFT + "dpo\nmax_length: 2048\npadding_free: true\n",
        {"ctx": 512},
        {"ctx": 512},
        set(),
    ),
    "ms-swift packs full rows": (
        _SWIFT + "dpo\nmax_length: 2048\npacking: true\npadding_free: true\n",
        {},
        {"ctx": 2048, "packing": True},
        set(),
    ),
    "one sequence has no padding": (
        f"base_model: {_MODEL}\nmicro_batch_size: 1\nbatch_flattening: true\n",
        {},
        {"bs": 1},
        set(),
    ),
    "ms-swift's DPO": (_SWIFT + "dpo\nmax_length: 2048\n", {}, {"ctx": 2048}, set()),
    "LLaMA-Factory's PPO has its value on the policy": (
        f"model_name_or_path: {_MODEL}\nstage: ppo\nfinetuning_type: lora\ncutoff_len: 2048\n"
        "max_new_tokens: 512\nreward_model: saves/reward\nppo_epochs: 1\n",
        {},
        {"workload": "rloo", "ctx": 2560, "completion": 512, "teacher": None},
        set(),
    ),
    "LLaMA-Factory's PPO with a whole reward model": (
        f"model_name_or_path: {_MODEL}\nstage: ppo\nfinetuning_type: full\nreward_model_type: full\n"
        f"reward_model: {_MODEL}\n",
        {},
        {"ctx": 3072, "teacher": "Qwen2.5-0.5B-Instruct"},
        {"ppo_epochs"},
    ),
    "verl": (_VERL, {}, {"ctx": 1024, "old_logprobs": True}, {"actor_rollout_ref.rollout"}),
    "verl's micro-batches of tokens hold as many as may come": (
        _VERL + "trainer.n_gpus_per_node: 2\nactor_rollout_ref.actor.ppo_mini_batch_size: 40\n"
        "actor_rollout_ref.actor.use_dynamic_bsz: true\n"
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu: 12000\n",
        {},
        {"bs": 11, "grad_accum": 2, "rollout_trainer": "verl", "entropy_loss": None},
        {"actor_rollout_ref.rollout"},
    ),
    "verl without padding holds what its sequences really have": (
        _VERL.replace("padding: false", "padding: true"),
        {},
        {"bs": 4, "ctx": 1024},
        {"actor_rollout_ref.rollout", "data.max_response_length"},
    ),
    "verl with lengths as they are": (
        _VERL.replace("padding: false", "padding: true"),
        {"ctx": 300},
        {"bs": 4},
        {"actor_rollout_ref.rollout"},
    ),
    "verl's adapters go to the engine layer by layer": (
        _VERL + "actor_rollout_ref.model.lora_rank: 8\n"
        "actor_rollout_ref.rollout.layered_summon: true\n",
        {"gpu": "h100", "gpus": 2},
        {"rollout_sync": "layer", "rollout_sleep": 1},
        set(),
    ),
    "verl's engine within its share": (
        _VERL + "actor_rollout_ref.rollout.max_num_seqs: 512\n",
        {"gpu": "h100"},
        {"rollout": "vllm"},
        {"actor_rollout_ref.rollout.max_num_seqs"},
    ),
    "verl sums gradients in the type that it is told": (
        _VERL + "actor_rollout_ref.actor.fsdp_config.mixed_precision:\n"
        "  {param_dtype: bf16, reduce_dtype: bf16, buffer_dtype: fp32}\n",
        {"gpus": 2},
        {"precision": "bf16", "reduce_dtype": "bf16", "sharded_dtype": "fp32"},
        {"actor_rollout_ref.rollout"},
    ),
    "verl keeps gradients whole until the last micro-batch where it says so": (
        _VERL + "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation: true\n",
        {"gpus": 2},
        {"sync_each_batch": False},
        {"actor_rollout_ref.rollout"},
    ),
    "verl with the entropy in its loss": (
        _VERL + "actor_rollout_ref.actor.entropy_coeff: 0.001\n",
        {},
        {"entropy_loss": True, "rollout_trainer": "verl"},
        {"actor_rollout_ref.rollout"},
    ),
    "verl under Megatron with the entropy in its loss": (
        _VERL + "actor_rollout_ref.actor.entropy_coeff: 0.001\n"
        "actor_rollout_ref.actor.strategy: megatron\n",
        {},
        {"entropy_loss": None},
        {"actor_rollout_ref.rollout", "actor_rollout_ref.actor.entropy_coeff"},
    ),
    "a vLLM server for TRL": (
        _TRL + "use_vllm: true\nvllm_mode: server\n",
        {},
        {"rollout": "none"},
        {"use_vllm"},
    ),
    "verl without a second forward": (
        _VERL + "algorithm.rollout_correction.bypass_mode: true\n"
        "actor_rollout_ref.actor.ppo_epochs: 2\n",
        {},
        {"old_logprobs": False},
        {"actor_rollout_ref.rollout", "actor_rollout_ref.actor.ppo_epochs"},
    ),
    "NeMo-RL scores more sequences than an update takes": (
        "grpo: {num_prompts_per_step: 8}\npolicy: {model_name: llama-3.2-1b,"
        " train_micro_batch_size: 2, logprob_batch_size: 4, generation: {backend: vllm}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n",
        {"gpu": "h100"},
        {"bs": 2, "score_bs": 4, "rollout_trainer": "nemo-rl"},
        set(),
    ),
    "verl's keys of 2025's first months": (
        _VERL + "actor_rollout_ref.actor.fsdp_config.grad_offload: false\n",
        {"gpu": "h100"},
        {"rollout_trainer": "verl-0.3", "reference": True, "entropy_loss": True},
        set(),
    ),
    "verl's keys that a release had to be given": (
        _VERL + "+trainer.val_before_train: false\n",
        {"gpu": "h100"},
        {"rollout_trainer": "verl-0.3", "reference": True},
        set(),
    ),
    "verl of 2025's first months, asked for": (
        _VERL,
        {"gpu": "h100", "rollout_trainer": "verl-0.3"},
        {"reference": True, "entropy_loss": True},
        set(),
    ),
    "OpenRLHF": (
        f"actor: {{model_name_or_path: {_MODEL}}}\ndata: {{max_len: 4096}}\n",
        {},
        {"ctx": 4096, "old_logprobs": True},
        {"vllm.num_engines"},
    ),
    "OpenRLHF without padding": (
        f"actor: {{model_name_or_path: {_MODEL}}}\ndata: {{max_len: 4096}}\n"
        "ds: {packing_samples: true}\ntrain: {micro_batch_size: 4}\n",
        {},
        {"bs": 4, "packing": True},
        {"vllm.num_engines", "data.max_len"},
    ),
    "ms-swift's engine where no mode is said": (
        _SWIFT + "grpo\nuse_vllm: true\nsleep_level: 1\n",
        {"gpu": "h100"},
        {"rollout": "vllm", "rollout_sleep": 1},
        set(),
    ),
    "ms-swift's engine behind an address": (
        _SWIFT + "grpo\nuse_vllm: true\nvllm_server_host: node-1\n",
        {"gpu": "h100"},
        {"rollout": "none"},
        {"use_vllm"},
    ),
    "ms-swift without an engine: nothing sleeps or waits for it": (
        _SWIFT + "grpo\nuse_vllm: false\nsleep_level: 1\noffload_model: true\n",
        {"gpu": "h100"},
        {"rollout": None, "rollout_offload": None},
        set(),
    ),
    "ms-swift's server generates beside the step": (
        _SWIFT + "grpo\nuse_vllm: true\nvllm_mode: server\noffload_optimizer: true\n"
        "async_generate: true\n",
        {"gpu": "h100"},
        {"rollout": "none", "rollout_offload": None},
        {"use_vllm", "async_generate"},
    ),
    "ms-swift's engine before modes": (
        _SWIFT + "grpo\nuse_vllm: true\nvllm_device: auto\n",
        {"gpu": "h100"},
        {"rollout": "none"},
        {"use_vllm"},
    ),
    "sizes of images where the model reads text": (
        _SWIFT + "grpo\nuse_vllm: false\nMAX_PIXELS: 602112\nVIDEO_MAX_PIXELS: 50176\n",
        {},
        {"max_pixels": None},
        set(),
    ),
    "torchtune's GRPO trains on all answers at once": (
        _TUNE + "loss: {_component_: torchtune.dev.grpo.loss.GRPOSimpleLoss}\ngrpo_samples: 8\n",
        {},
        {"bs": 16, "ctx": 320, "completion": 64, "old_logprobs": True},
        {"sharding"},  # over GPUs that the file does not count
    ),
    "torchtune's PPO": (
        _TUNE.replace("steps: 1", "steps: 4")
        + "loss: {_component_: torchtune.rlhf.loss.PPOLoss}\nppo_batch_size: 32\nppo_epochs: 2\n",
        {},
        {"bs": 8, "grad_accum": 4, "ctx": 320},
        {"ppo_epochs"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_what_is_generated(name: str, tmp_path: Path) -> None:
    text, flags, options, named = CASES[name]
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    found = with_job_file({**flags, "job": str(path)}, [])
    assert {key: found.get(key) for key in options} == options
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    assert {key.name for key in keys.of(KeyUse.NOT_PRICED)} == named
    assert not list(keys.of(KeyUse.UNKNOWN))


_ONE_PROCESS = (
    "--pretrain meta-llama/Llama-3.2-1B --reward_pretrain meta-llama/Llama-3.2-1B --bf16"
    " --micro_train_batch_size 2 --micro_rollout_batch_size 4 --train_batch_size 64"
    " --prompt_max_len 512 --generate_max_len 512 --zero_stage 2 --gradient_checkpointing"
)


@pytest.mark.parametrize(
    ("program", "expected", "named"),
    (
        (
            "deepspeed --num_gpus 8 --module openrlhf.cli.train_ppo",
            {
                **{"gpus": 8, "grad_accum": 4, "rollout": "hf", "score_bs": 4, "ctx": 1024},
                "rollout_trainer": "openrlhf-0.5",
            },
            set(),
        ),
        (
            "python -m openrlhf.cli.train_ppo_ray --actor_num_gpus_per_node 8",
            {
                **{"rollout": "none", "score_bs": 4, "reference_at": "apart"},
                "rollout_trainer": "openrlhf",
            },
            {"vllm.num_engines"},
        ),
    ),
)
def test_openrlhf_without_ray_has_all_models_in_one_process(
    program: str, expected: dict[str, object], named: set[str], tmp_path: Path
) -> None:
    """Reference, reward model and critic beside the actor, which generates itself (OpenRLHF v0.6.1
    cli/train_ppo.py)."""
    path = tmp_path / "ppo.sh"
    path.write_text(f"{program} {_ONE_PROCESS}\n", encoding="utf-8")
    found = with_job_file({"job": str(path)}, [])
    assert {key: found.get(key) for key in expected} == expected
    assert (found["workload"], found["teacher"]) == ("ppo", "Llama-3.2-1B")
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    assert {key.name for key in keys.of(KeyUse.NOT_PRICED)} == named


def test_openrlhf_says_in_which_type_gradients_add_up(tmp_path: Path) -> None:
    path = tmp_path / "ppo.sh"
    line = f"python -m openrlhf.cli.train_ppo_ray {_ONE_PROCESS} --grad_accum_dtype fp32"
    path.write_text(line.replace("--zero_stage 2", "--zero_stage 3"), encoding="utf-8")
    found = with_job_file({"job": str(path)}, [])
    assert found["reduce_dtype"] == "fp32"
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    assert "ds.grad_accum_dtype" not in {key.name for key in keys.of(KeyUse.NOT_PRICED)}


def test_what_an_engine_elsewhere_generates_transformers_does_not() -> None:
    """Without a GPU to price the engine on, the step is the policy's and the reference's forwards
    and updates: a cache of transformers' generate was the peak."""
    from napkinmath import estimate

    shared = {"model": "qwen2.5-0.5b", "workload": "grpo", "bs": 2, "ctx": 512, "grad_accum": 512}
    made, elsewhere = (estimate(**shared, rollout=engine) for engine in ("hf", "none"))
    phases = [
        {segment.phase for _, turn in e.step.micro_steps for segment in turn}
        for e in (made, elsewhere)
    ]
    assert phases[0] - phases[1] == {Phase.ROLLOUT}
    assert elsewhere.memory.requested < made.memory.requested
    assert any("made elsewhere" in line for line in elsewhere.assumptions)


@pytest.mark.parametrize(
    ("pin", "trainer"), [("verl==0.3.0.post1", "verl-0.3"), ("verl==0.4.1", "verl"), ("", "verl")]
)
def test_a_pin_beside_a_file_says_which_verl_it_is_for(
    pin: str, trainer: str, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text(f"torch\n{pin}\n", encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(_VERL, encoding="utf-8")
    found = with_job_file({"job": str(path), "gpu": "h100"}, [])
    assert found["rollout_trainer"] == trainer
    assert found["reference"] is (trainer == "verl-0.3")


@pytest.mark.parametrize(("pin", "each"), [("verl==0.9.1", True), ("verl==0.10.0", False)])
def test_verl_reduces_in_each_micro_batch_before_0_10(pin: str, each: bool, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"{pin}\n", encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(_VERL, encoding="utf-8")
    found = with_job_file({"job": str(path), "gpu": "h100", "gpus": 2}, [])
    assert found["sync_each_batch"] is each


@pytest.mark.parametrize(("beta", "refers"), [("", True), ("beta: 0\n", False)])
def test_ms_swift_has_a_reference_by_itself(beta: str, refers: bool, tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(_SWIFT + "grpo\n" + beta, encoding="utf-8")
    assert with_job_file({"job": str(path)}, [])["reference"] is refers


def test_an_update_takes_no_more_prompts_than_were_drawn(tmp_path: Path) -> None:
    """Logic-RL asks for mini-batches of 256 prompts of which 16 are drawn: sixteen times as many
    micro-steps were priced as there are."""
    path = tmp_path / "run.yaml"
    path.write_text(
        _VERL + "trainer.n_gpus_per_node: 4\nactor_rollout_ref.rollout.n: 8\n"
        "actor_rollout_ref.actor.ppo_mini_batch_size: 256\ndata.train_batch_size: 16\n"
    )
    found = with_job_file({"job": str(path)}, [])
    assert (found["bs"], found["grad_accum"]) == (4, 8)
