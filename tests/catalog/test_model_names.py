"""Names that people write: fine-tunes and quantized checkpoints mean their base, near-misses and
what is no model mean nothing."""

from __future__ import annotations

import pytest
from napkinmath.base.errors import InputError
from napkinmath.catalog.model_names import refusal
from napkinmath.catalog.models import find_row, load_rows, stored_format, unknown_model
from napkinmath.catalog.quantization import FORMATS
from napkinmath.inputs.jobs import priced
from napkinmath.models.families import FAMILIES, is_learned
from napkinmath.models.read import read_model

UNDERSTOOD = {
    "unsloth/Llama-3.2-1B-Instruct-bnb-4bit": ("llama-3.2-1b", "nf4"),
    "unsloth/Qwen3-4B-unsloth-bnb-4bit": ("qwen3-4b", "nf4"),
    "unsloth/Meta-Llama-3.1-8B-bnb-8bit": ("llama-3.1-8b", "int8"),
    "hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16": ("llama-3.1-405b", "nf4"),
    "NousResearch/Meta-Llama-3-8B": ("llama-3-8b", ""),
    "TheBloke/Mistral-7B-v0.1-GPTQ": ("mistral-7b-v0.1", "gptq-int4"),
    "TheBloke/Mistral-7B-Instruct-v0.2-AWQ": ("mistral-7b-v0.2", "awq-int4"),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": ("qwen2.5-7b", "gptq-int8"),
    "Qwen/Qwen-7B-Chat-Int4": ("qwen-7b", "gptq-int4"),
    "/data/models/Qwen3-8B-AWQ/": ("qwen3-8b", "awq-int4"),
    "C:\\models\\Qwen3-8B": ("qwen3-8b", ""),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": ("llama-3.1-8b", ""),
    "nvidia/Qwen3-30B-A3B-NVFP4": ("qwen3-30b-a3b", "nvfp4"),
    "openai/gpt-oss-20b-mxfp4": ("gpt-oss-20b", "mxfp4"),
    "mlx-community/Llama-3.2-3B-Instruct-bf16": ("llama-3.2-3b", ""),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral-7b-v0.3", ""),
    "Qwen/Qwen3-30B-A3B-Thinking-2507": ("qwen3-30b-a3b", ""),
    "someone/Qwen2.5-7B-Instruct-RLVR": ("qwen2.5-7b", ""),
    "someone/sudoku-grpo-Qwen3-1.7B": ("qwen3-1.7b", ""),
    "my-llama-3.1-8b-customer-sft": ("llama-3.1-8b", ""),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": ("qwen2.5-32b", ""),
    "llama2-7b": ("llama-2-7b", ""),
    "hfl/chinese-llama-2-13b-16k": ("chinese-alpaca-2-13b", ""),
    "Qwen/Qwen2.5-7B-Instruct-1M": ("qwen2.5-7b-1m", ""),
    "Qwen/Qwen3-Embedding-4B": ("qwen3-embedding-4b", ""),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": ("nemotron-3-nano-30b-a3b", ""),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": ("llama-3.2-11b-vision", ""),
    "allenai/Llama-3.1-Tulu-3-8B-SFT": ("llama-3.1-tulu-3-8b", ""),
    "someone/llama-3-1-8b-math-orca-10k-ep1": ("llama-3.1-8b", ""),
    "philschmid/llama-3-1-8b-math-orca-qlora-10k-ep1-merged": ("llama-3.1-8b", ""),
    "someone/llama-3.1-8b-assistant": ("llama-3.1-8b", ""),
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": ("distilbert-base-uncased", ""),
    "tokyotech-llm/Llama-3.1-Swallow-8B-v0.3": ("llama-3.1-8b", ""),
    "elyza/Llama-3-ELYZA-JP-8B": ("llama-3-8b", ""),
    "NousResearch/DeepHermes-3-Llama-3-8B-Preview": ("llama-3-8b", ""),
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": ("llama-3.1-8b-reward", ""),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": ("qwen3-0.6b-reward", ""),
    "allenai/tulu-2-dpo-7b": ("llama-2-7b", ""),
    "TheBloke/Orca-2-7B-AWQ": ("orca-2-7b", "awq-int4"),
    "baichuan-inc/Baichuan-M2-32B-GPTQ-Int4": ("qwen2.5-32b", "gptq-int4"),
    "unsloth/KernelLLM-bnb-4bit": ("llama-3.1-8b", "nf4"),
    "./outputs/Qwen2.5-7B-sft/checkpoint-500": ("qwen2.5-7b", ""),
    "ckpt/verl/qwen2.5-7b-grpo/global_step_100/actor/huggingface/": ("qwen2.5-7b", ""),
    "/cache/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd": ("qwen3-8b", ""),
    "runs/olmo3-32b-instruct-SFT/step814-hf": ("olmo-3-32b", ""),
    "arcee-ai/Trinity-Nano-Preview": ("trinity-nano", ""),
    "deepcogito/cogito-v1-preview-qwen-14B": ("qwen2.5-14b", ""),
    "01-ai/Yi-34B-Chat-4bits": ("yi-34b", "awq-int4"),
    "01-ai/Yi-6B-Chat-8bits": ("yi-6b", "gptq-int8"),
    "baichuan-inc/Baichuan2-13B-Chat-4bits": ("baichuan2-13b", "nf4"),
    "philschmid/flan-t5-base-samsum": ("flan-t5-base", ""),
    "deepset/roberta-base-squad2": ("roberta-base", ""),
    "oumi-ai/HallOumi-8B-classifier": ("llama-3.1-8b-classifier", ""),
    "01-ai/Yi-1.5-9B-Chat-16K": ("yi-9b", ""),
    "unsloth/embeddinggemma-300m": ("embeddinggemma-300m", ""),
    "EssentialAI/rnj-1-instruct": ("rnj-1", ""),
    "LLM-Research/Phi-4-multimodal-instruct": ("phi-4-multimodal", ""),
    "moonshotai/Kimi-K2.7-Code": ("kimi-k2.5", ""),
    "nvidia/Llama-3.3-70B-Instruct-FP4": ("llama-3.3-70b", "nvfp4"),
    "unsloth/Ministral-3-14B-Instruct-2512-unsloth-bnb-4bit": ("ministral-3-14b", "nf4"),
    "cyankiwi/Qwen3-VL-8B-Instruct-AWQ-4bit": ("qwen3-vl-8b", "awq-int4"),
    "mistralai/Mistral-Large-3-675B-Instruct-2512": ("mistral-large-3-675b", ""),
    "OpenGVLab/InternVL3_5-30B-A3B": ("internvl3.5-30b-a3b", ""),
    "LiquidAI/LFM2-VL-1.6B": ("lfm2-vl-1.6b", ""),
    "deepseek-r1:7b": ("qwen2.5-7b", ""),
    "deepseek-r1:70b": ("llama-3.3-70b", ""),
    "qwen3:30b-a3b": ("qwen3-30b-a3b", ""),
    "Qwen3 8B": ("qwen3-8b", ""),
    "gptoss20b": ("gpt-oss-20b", ""),
}
UNKNOWN = [
    "/model",
    "./final",
    "someone/global_step_20/actor/huggingface",
    "Qwen/Qwen2.5-3B-1M",
    "someone/Qwen3-8B-1M",
    "Qwen/Qwen3-8B-Foo",  # what a publisher names anew may have other sizes
    "someone/pirate-qwen-14B",  # of three generations
    "someone/dolphin-mistral-7b",
    "someone/gizmo-v1-preview-llama-3B",
    "someone/tiny_qwen3_moe_2.8B_0.7B",
    "someone/llama3-8b-pro",
    "llava-hf/llava-interleave-qwen-7b-hf",
    "someone/hindi-roberta-base",  # of what vocabulary
    "someone/Llama-3-8B-Distill-Foo-1B",
    "someone/Llama-3.1-8B-Vision",
    "nvidia/Llama-3.1-Foo-51B",
    "someone/Llama-3.2-Foo-Vision-1B",
    "someone/Llama-3.1-8B-Omni",
    "someone/Qwen3-8B-Embedding",
    "someone/Qwen3-4B-pruned",
    "someone/Llama-3.1-Minitron-4B-Width-Base",
    "llama-3.2-1b-int8",  # of which of four formats
    "CohereForAI/c4ai-command-r-08-2024",
    "someone/llama-3-8b-4bits",  # of which of four formats
    "google/vit-base-classifier",  # an encoder's classifier has more than a score
    "qwen3",
    "8b",
]
REFUSED = {
    "unsloth/Qwen3-8B-GGUF": "GGUF",
    "someone/llama-3-8b.Q4_K_M.gguf": "GGUF",
    "mlx-community/Llama-3.2-3B-Instruct-4bit": "inference engine",
    "RedHatAI/Llama-3.2-1B-Instruct-quantized.w8a8": "inference engine",
    "turboderp/Llama-3.1-8B-Instruct-exl2": "inference engine",
    "someone/opt-6.7b-lora": "adapter",
    "someone/zephyr-7b-sft-qlora": "adapter",
    "someone/Qwen3-1.7B_eagle3": "draft head",
    "someone/Qwen3-4B-DFlash-b16": "draft head",
    "internlm/internlm2-1_8b-reward": "reward model",
    "Qwen/Qwen2.5-Math-PRM-7B": "process reward model",
    "OpenVINO/Qwen3-8B-int4-ov": "inference engine",
    "ISTA-DASLab/Meta-Llama-3-8B-AQLM-PV-1Bit-1x16": "a format that is not priced",
    "MAGAer13/mplug-owl2-llama2-7b": "code of its own repository",
    "nvidia/Eagle2-9B": "code of its own repository",
    "openai/gpt-5.2": "no public weights",
    "microsoft/Phi-3-vision-128k-instruct": "code of its own repository",
    "databricks/dbrx-base": "from a public source",
    "Lightricks/LTX-Video": "pictures",
    "tencent/HunyuanVideo": "pictures",
    "unsloth/csm-1b": "frames of sound codes",
    "unsloth/Llasa-3B": "from a public source",
    "LGAI-EXAONE/K-EXAONE-2.0-750B-A37B": "from a public source",
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16": "code of its own repository",
    "nvidia/Llama-3.1-Nemotron-Nano-VL-8B-V1": "code of its own repository",
    "CohereLabs/aya-vision-8b": "from a public source",
    "CohereLabs/command-a-vision-07-2025": "from a public source",
    "google/t5gemma-2-1b-1b": "from a public source",
    "allenai/Molmo2-8B": "from a public source",
}
# Files for an engine and adapters: the refusal names what they may have been made of.
MADE_OF = {
    "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF": "qwen3-30b-a3b",
    "lmstudio-community/Meta-Llama-3.1-8B-Instruct-GGUF": "llama-3.1-8b",
    "lmstudio-community/gpt-oss-20b-MLX-8bit": "gpt-oss-20b",
    "mlx-community/Qwen3-8B-4bit": "qwen3-8b",
    "someone/llama-3-8b.Q4_K_M.gguf": "llama-3-8b",
    "unsloth/gemma-3-27b-it-qat-GGUF": "gemma-3-27b",
    "RedHatAI/Qwen3-8B-quantized.w4a16": "qwen3-8b",
    "someone/opt-6.7b-lora": "opt-6.7b",
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_a_fine_tune_means_its_base_and_how_it_is_stored(name: str) -> None:
    row = find_row(name)
    assert row is not None
    assert (row["name"], stored_format(name)) == UNDERSTOOD[name]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_near_miss_is_no_other_model(name: str) -> None:
    assert find_row(name) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_model_is_refused_by_its_reason(name: str) -> None:
    assert find_row(name) is None
    message = str(unknown_model(name))
    assert REFUSED[name] in message and "\n" not in message and "list:" in message


@pytest.mark.parametrize("name", MADE_OF)
def test_a_refused_file_names_the_model_it_may_be_made_of(name: str) -> None:
    assert f"(which may be {MADE_OF[name]})" in str(unknown_model(name))
    assert "which may be" not in str(unknown_model("someone/nothing-known-GGUF"))


def test_every_row_answers_to_its_own_names_and_to_their_usual_endings() -> None:
    """No rule about words takes a catalogued name for another model."""
    for row in load_rows():
        for name in [row["name"], *row["aliases"], *filter(None, [row["hub_id"]])]:
            found = find_row(name)
            assert found is not None and found["name"] == row["name"], name
            assert stored_format(name) in ("", *FORMATS)
            if not refusal(name):
                quantized = find_row(name + "-unsloth-bnb-4bit")
                assert quantized is not None and quantized["name"] == row["name"], name


def test_the_stored_format_is_priced_and_never_trained_itself() -> None:
    notes: list[str] = []
    named = {"model": "unsloth/SmolLM2-135M-bnb-4bit", "ctx": 128}
    (found,) = priced({**named, "method": "lora"}, notes)
    (asked,) = priced({"model": "smollm2-135m", "ctx": 128, "method": "lora", "quant": "nf4"}, [])
    assert found.memory.allocated == asked.memory.allocated
    assert any("nf4" in note and "smollm2-135m" in note for note in notes)
    with pytest.raises(InputError, match="--lora, or give smollm2-135m"):
        priced(named, [])


@pytest.mark.torch
def test_a_reward_model_is_its_base_with_one_score() -> None:
    """The row is one that the count against transformers would pass."""
    from recount_models import count_parameters

    labels = {"someone/SmolLM2-135M-reward": 1, "llama-2-7b-rm": 1, "SmolLM2-135M-classifier": 2}
    for name, count in labels.items():
        row = find_row(name)
        assert row is not None and row["class"] == "LlamaForSequenceClassification"
        assert row["config"]["num_labels"] == count
        assert count_parameters(row) == row["parameters"]
        assert read_model(name).task == "sequence-classification"


NEAREST = {
    "Qwen/Qwn2.5-7B-Instruct": "qwen2.5-7b",
    "mistralai/Mistral-7B-v0.4": "mistral-7b-v0.1",
    "smolm2-135m": "smollm2-135m",
    "roberta-bas": "roberta-base",
    "lama-3-8b": "llama-3-8b",
    "pythia-12": "pythia-12b",
    "meta-llama/Llama-Guard-5-12B": "llama-",
    "gemma-4": "gemma-4-",
    "llama3.1": "llama-3.1-8b",
    "phi3.5": "phi-3.5-",
    "gpt-oss": "gpt-oss-20b",
    "deepseek-v4": "deepseek-v4-",
    "meta-llama/Meta-Llama-3-8B-Insturct": "llama-3-8b",
}


@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_names_are_of_the_same_family_and_size(name: str) -> None:
    assert f"did you mean {NEAREST[name]}" in str(unknown_model(name))


def test_a_path_of_another_machine_says_which_model_it_was() -> None:
    notes: list[str] = []
    (found,) = priced({"model": "/cluster/models/SmolLM2-135M-Instruct", "ctx": 128}, notes)
    assert found.spec.name == "smollm2-135m" and any("smollm2-135m" in note for note in notes)
    for path in ("/cluster/models/mine", "./qwen3-8b/config.json"):
        with pytest.raises(InputError, match="does not exist"):
            read_model(path)


def test_a_row_without_rules_says_the_way_out() -> None:
    for row in load_rows():
        kind = row["config"]["model_type"]
        if kind in FAMILIES or is_learned(kind):
            continue
        with pytest.raises(InputError, match=f"estimate trace --model {row['name']}"):
            read_model(row["name"])


def test_vocabularies_tell_near_namesakes_apart() -> None:
    """Names that differ by a word and models that differ by their tokens."""
    sizes = {
        name: (found := find_row(name)) and found["config"]["vocab_size"]
        for name in (
            "Mistral-7B-v0.1",
            "Mistral-7B-v0.3",
            "Qwen3-4B",
            "Qwen3-Embedding-4B",
            "Qwen3-Reranker-0.6B",
            "Llama-3.1-8B",
            "Llama-3.1-Tulu-3-8B",
        )
    }
    assert list(sizes.values()) == [32000, 32768, 151936, 151665, 151669, 128256, 128264]
