"""What a script's adapter is given to, the type in which its packed weights are multiplied, and the
release that its own text pins."""

from __future__ import annotations

from pathlib import Path

import pytest
from napkinmath.answers.estimate import Estimate
from napkinmath.base.errors import InputError
from napkinmath.cli.estimate_command import make_estimates
from napkinmath.config.job_keys import JobKey
from napkinmath.inputs.job_file import with_job_file
from napkinmath.ir.ledger import Phase
from napkinmath.planning.search import reaches

LORA = "lora = LoraConfig(r=4)\n"
LOAD = 'model = AutoModelForCausalLM.from_pretrained("llama-3.2-1b"{})\n'
TRAIN = "SFTTrainer(model=model, args=SFTConfig(max_length=64){})\n"


def options_of(
    folder: Path, text: str, name: str = "a.py", **given: object
) -> tuple[dict[str, object], list[str]]:
    path = folder / name
    path.write_text(text)
    notes: list[str] = []
    return with_job_file({"job": str(path), **given}, notes), notes


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (LOAD.format("") + LORA + TRAIN.format(""), "full"),
        (LOAD.format("") + LORA + TRAIN.format(", peft_config=lora"), "lora"),
        # functions of modules that are not there
        (LOAD.format("") + LORA + "model = wrap(model, lora)\n" + TRAIN.format(""), "lora"),
        (LOAD.format("") + LORA + "mine = wrap(lora)\nmodel = f(1)\n" + TRAIN.format(""), "lora"),
        (LOAD.format("") + LORA + "model = f(1)\n" + TRAIN.format(""), "full"),
    ],
)
def test_an_adapter_counts_where_something_is_given_it(
    text: str, method: str, tmp_path: Path
) -> None:
    """One that is made and left was priced as LoRA where the model was not followed, and dropped
    without a word where it was; one that an unknown function puts on a model was lost."""
    options, notes = options_of(tmp_path, text)
    assert str(options.get("method", "full")) == method
    said = any("LoraConfig on line 2 is given to nothing" in note for note in notes)
    assert said == (method == "full")


def test_an_adapter_is_given_where_a_model_is_loaded(tmp_path: Path) -> None:
    text = LORA + LOAD.format(", peft_config=lora") + TRAIN.format("")
    assert options_of(tmp_path, text)[0]["method"] == "lora"


def packed(said: str) -> str:
    config = f"BitsAndBytesConfig(load_in_4bit=True{said})"
    load = LOAD.format(f", quantization_config={config}")
    return load + LORA + TRAIN.format(", peft_config=lora")


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        (packed(""), "fp32"),  # transformers' default, which bitsandbytes 0.47 keeps to
        (packed(", bnb_4bit_compute_dtype=torch.bfloat16"), "bf16"),
        (packed(", bnb_4bit_compute_dtype='float16'"), "fp16"),
        (packed(", bnb_4bit_compute_dtype=chosen(args)"), None),
        ("# bitsandbytes==0.46.1\n" + packed(""), None),  # its first input's type counted
        ("# transformers==4.44.2\n" + packed(""), None),
        ("# bitsandbytes==0.50.0\n" + packed(""), "fp32"),
    ],
)
def test_the_type_of_packed_products(text: str, type_: str | None, tmp_path: Path) -> None:
    """A script's bnb_4bit_compute_dtype was dropped without a word."""
    options, notes = options_of(tmp_path, text)
    assert options.get("quant_compute_dtype") == type_
    assert any("quant_compute_dtype not given" in note for note in notes) == (type_ == "fp32")


def test_an_older_stack_keeps_the_type_of_its_inputs(tmp_path: Path) -> None:
    options, _ = options_of(tmp_path, packed(""), stack="hf-2024")
    assert "quant_compute_dtype" not in options


@pytest.mark.parametrize("name", ["a.py", "a.ipynb"])
def test_a_script_pins_its_release_itself(name: str, tmp_path: Path) -> None:
    """Notebooks install what they were written for; they were read by the newest TRL."""
    import json

    text = LOAD.format("") + TRAIN.format("")
    pip = "!pip install trl==0.11.4\n" if name.endswith("b") else "# pip install trl==0.11.4\n"
    cells = [{"cell_type": "code", "source": [line]} for line in (pip, text)]
    options, notes = options_of(
        tmp_path, json.dumps({"cells": cells}) if name.endswith("b") else pip + text, name
    )
    assert options["stack"] == "trl-0.11" and any("pins trl 0.11" in note for note in notes)
    assert options_of(tmp_path, text)[0].get("stack") is None
    # unsloth puts its own steps into the trainer of any release
    plain = options_of(tmp_path, f"{pip}import unsloth\n{text}".replace("!", "# "))[0]
    assert plain.get("stack") is None


_FAST = (
    "from unsloth import FastLanguageModel\nfrom trl import SFTConfig, SFTTrainer\n"
    "model, t = FastLanguageModel.from_pretrained('{}'{})\n"
    "model = FastLanguageModel.get_peft_model(model, r=8, modules_to_save=[])\n"
    "SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2)).train()\n"
)


@pytest.mark.parametrize(
    ("name", "said", "quant"),
    [
        ("unsloth/Qwen3-4B", "", "nf4"),
        ("unsloth/Qwen3-4B", ", load_in_8bit=True, load_in_4bit=False", "int8"),
        ("unsloth/Qwen3-4B", ", load_in_4bit=False, load_in_16bit=True", None),
        ("unsloth/Qwen3-4B-BF16", "", None),
        ("unsloth/Qwen3-4B", ", quantization_config=BitsAndBytesConfig(load_in_8bit=True)", "int8"),
    ],
)
def test_unsloth_loads_in_four_bits_unless_it_is_told_otherwise(
    name: str, said: str, quant: str | None, tmp_path: Path
) -> None:
    """An empty list of modules to save was refused as well."""
    options, _ = options_of(tmp_path, _FAST.replace("{}", name, 1).replace("{}", said, 1))
    assert options.get("quant") == quant and "train_modules" not in options
    assert not any(key in str(options) for key in ("load_in_16bit",))


def test_two_widths_with_which_unsloth_ends_are_refused(tmp_path: Path) -> None:
    text = _FAST.replace("{}", "unsloth/Qwen3-4B", 1).replace("{}", ", load_in_8bit=True", 1)
    with pytest.raises(InputError, match=r"line 3 loads in 8 bits.*load_in_4bit=False"):
        options_of(tmp_path, text)


def priced_on(
    folder: Path, text: str, name: str = "a.py", **given: object
) -> tuple[Estimate, list[str]]:
    path = folder / name
    path.write_text(text)
    notes: list[str] = []
    return make_estimates({"job": [str(path)], **given}, notes)[0], notes


def test_unsloth_computes_in_the_type_that_the_gpu_has(tmp_path: Path) -> None:
    """A T4 ran in bf16, five times slower, where unsloth takes fp16."""
    text = _FAST.replace("{}", "unsloth/Qwen3-0.6B", 1).replace("{}", "", 1)
    on_t4, notes = priced_on(tmp_path, text, gpu=["t4"])
    assert on_t4.config.precision.value == "fp16-autocast"
    assert any("unsloth takes fp16 on T4" in note for note in notes)
    assert priced_on(tmp_path, text, gpu=["l4"])[0].config.precision.value == "bf16-autocast"
    assert priced_on(tmp_path, text)[0].config.precision.value == "bf16-autocast"
    said, _ = priced_on(tmp_path, text, gpu=["t4"], precision="bf16-autocast")
    assert said.config.precision.value == "bf16-autocast"


def test_what_unsloth_keeps_in_fp32_there_is_named(tmp_path: Path) -> None:
    text = _FAST.replace("{}", "unsloth/gemma-3-270m-it", 1)
    text = text.replace("{}", ", load_in_4bit=False", 1)
    made, _ = priced_on(tmp_path, text, gpu=["t4"])
    assert made.config.precision.value == "fp16-autocast"
    assert made.job_keys is not None and "fp32 activations" in str(made.job_keys.keys)
    here, _ = priced_on(tmp_path, text, gpu=["l4"])
    assert here.job_keys is not None and "fp32 activations" not in str(here.job_keys.keys)


def test_torchs_own_answer_counts_what_is_emulated(tmp_path: Path) -> None:
    """torch says that a T4 has bf16 (cuda/__init__.py is_bf16_supported, including_emulation)."""
    text = LOAD.format("") + TRAIN.format("").replace(
        "max_length=64", "max_length=64, bf16=torch.cuda.is_bf16_supported()"
    )
    made, _ = priced_on(tmp_path, text, gpu=["t4"])
    assert "bf16" in made.config.precision.value


def test_unsloth_widens_nothing_of_families_without_its_kernels(tmp_path: Path) -> None:
    """Gemma 2 had fp32 embeddings under QLoRA, as PEFT's preparation makes them."""
    text = _FAST.replace("{}", "unsloth/gemma-2-2b", 1).replace("{}", "", 1)
    made, _ = priced_on(tmp_path, text)
    assert made.config.kernels.value == "hf" and made.config.loss.value == "chunked"
    assert made.config.quantization is not None
    assert not made.config.quantization.kbit_preparation


def test_experts_of_a_pinned_transformers_are_packed(tmp_path: Path) -> None:
    """ERNIE 4.5 21B lay whole in 79 GiB where an L4 held it in 11.6."""
    text = _FAST.replace("{}", "unsloth/OLMoE-1B-7B-0924", 1).replace("{}", "", 1)
    newest, _ = priced_on(tmp_path, text)
    pinned, _ = priced_on(tmp_path, "# pip install transformers==4.56.2\n" + text)
    assert (newest.config.stack, pinned.config.stack) == ("hf", "hf-4.57")
    assert pinned.phase_peaks[Phase.LOAD].nbytes < newest.phase_peaks[Phase.LOAD].nbytes / 2


def test_unsloths_own_copy_in_four_bits_is_named(tmp_path: Path) -> None:
    """Its notebook held 11.9 GiB of Qwen3 14B after loading, where 9.5 are priced."""

    def priced(model: str, gpu: str) -> tuple[str, JobKey | None]:
        text = _FAST.replace("{}", f"unsloth/{model}", 1).replace("{}", "", 1)
        made, _ = priced_on(tmp_path, text, gpu=[gpu])
        assert made.job_keys is not None
        named = [key for key in made.job_keys.keys if key.name == "4-bit copy"]
        return made.verdict.value, named[0] if named else None

    verdict, small = priced("Qwen3-0.6B", "a100-80gb")
    assert small is not None and verdict == "fits" and small.more.fixed
    assert priced("Qwen3-0.6B-bnb-4bit", "t4")[1] is None
    assert priced("Qwen3-32B", "a100-80gb")[1] is None
    verdict, large = priced("Qwen3-14B", "t4")
    assert large is not None and verdict == "cannot tell"


def test_the_loss_of_older_unsloths_is_named_and_widens_the_range(tmp_path: Path) -> None:
    """Notebooks held 12.3 GiB of CodeGemma 7B where 7.2 are priced."""

    def named(gpu: str) -> tuple[str, JobKey]:
        text = _FAST.replace("{}", "unsloth/codegemma-7b-bnb-4bit", 1).replace("{}", "", 1)
        made, _ = priced_on(tmp_path, text, gpu=[gpu])
        assert made.job_keys is not None
        (key,) = [one for one in made.job_keys.keys if one.name == "loss of older releases"]
        return made.verdict.value, key

    verdict, key = named("a100-80gb")
    assert verdict == "fits" and "GiB more" in key.why
    verdict, key = named("rtx4060")
    assert verdict == "cannot tell"
    pairs = _FAST.replace("{}", "unsloth/codegemma-7b-bnb-4bit", 1).replace("{}", "", 1)
    made, _ = priced_on(tmp_path, pairs.replace("SFT", "ORPO"), gpu=["a100-80gb"])
    assert made.config.workload.kind.value == "orpo" and made.job_keys is not None
    assert all(one.name != "loss of older releases" for one in made.job_keys.keys)


@pytest.mark.parametrize(
    ("model", "family", "trained"),
    [("Phi-4", "llama", 65_536_000), ("Phi-3-medium-4k-instruct", "mistral", 65_536_000)],
)
def test_unsloths_copies_of_phi_have_a_linear_for_each_projection(
    model: str, family: str, trained: int, tmp_path: Path
) -> None:
    """Adapters lay on two of seven projections, the joint ones having other names."""
    text = _FAST.replace("{}", f"unsloth/{model}", 1).replace("{}", "", 1).replace("r=8", "r=16")
    made, _ = priced_on(tmp_path, text)
    assert (made.spec.family, made.num_trained) == (family, trained)
    assert made.config.kernels.value == "unsloth"


@pytest.mark.parametrize(
    ("download", "model"),
    [
        ("snapshot_download('unsloth/Qwen3-4B', local_dir='base')", "'./base'"),
        ("here = snapshot_download(repo_id='unsloth/Qwen3-4B')", "here"),
    ],
)
def test_a_folder_that_is_downloaded_is_its_repository(
    download: str, model: str, tmp_path: Path
) -> None:
    text = _FAST.replace("'{}'", model, 1).replace("{}", "", 1)
    options, _ = options_of(
        tmp_path, f"from huggingface_hub import snapshot_download\n{download}\n{text}"
    )
    assert options["model"] == "unsloth/Qwen3-4B"


def test_limits_leave_room_for_what_is_named(tmp_path: Path) -> None:
    """A printed batch of 24 could not be told when it was asked for."""
    text = _FAST.replace("{}", "unsloth/llama-3-8b-bnb-4bit", 1).replace("{}", "", 1)
    made, _ = priced_on(tmp_path, text, gpu=["t4"])
    assert made.memory.device.high - made.memory.device.value > made.job_keys.more_bytes(
        made.config
    )  # type: ignore[union-attr]
    for what, size in ((one.what, one.size) for one in reaches(made)):
        option = {"batch": "bs", "context": "ctx"}[what]
        assert priced_on(tmp_path, text, gpu=["t4"], **{option: size})[0].verdict.value == "fits"
        assert (
            priced_on(tmp_path, text, gpu=["t4"], **{option: size + 1})[0].verdict.value != "fits"
        )
