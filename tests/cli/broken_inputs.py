"""Inputs a person can get wrong, each with the part of it that the one-line error must quote.

A case is (command line, quoted part[, files]): `files` maps a name to text, bytes or a maker called
with the path; "@name" in the command line is that file's path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Broken(NamedTuple):
    argv: tuple[str, ...]
    quoted: str
    files: tuple[tuple[str, object], ...] = ()


def _flags(*rows: tuple[str, str]) -> list[Broken]:
    """'--bs 0' for a Llama, and the part quoted."""
    return [
        Broken(("--model", "llama-7b", *line.split("␣" if "␣" in line else None)), quoted)
        for line, quoted in rows
    ]


BAD_NUMBERS = _flags(
    ("--bs 0", "0"),
    ("--bs -1", "-1"),
    ("--bs 1.5", "1.5"),
    ("--bs four", "four"),
    ("--bs nan", "nan"),
    ("--bs inf", "inf"),
    ("--bs 1e400", "1e400"),
    ("--bs 4x", "4x"),
    ("--bs=", "--bs"),
    ("--bs ''", "''"),
    ("--bs 99999999999999999999", "99999999999999999999"),
    ("--bs 1,2,4", "1,2,4"),
    ("--ctx 1024:4096:512", "1024..4096:512 to `estimate sweep`"),
    ("--gpu h100,a100", "GPU 'h100,a100' has several values"),
    ("--bs 0x10", "0x10"),
    ("--bs ²", "²"),
    ("--gpu a100-²g.10gb", "²g.10gb"),
    ("--gpu a100-1g.²gb", "1g.²gb"),
    ("--gpus ²xH100", "²xh100"),
    ("--stack trl-0.²", "trl-0.²"),
    ("--gpus 16xH100 --nodes 2 --network ²", "'²'"),
    ("--gpus␣16xH100␣--nodes␣2␣--network␣²x ib-hdr", "²x ib-hdr"),
    ("--bs --ctx 4", "--ctx"),
    ("--ctx 0", "0"),
    ("--ctx -2048", "-2048"),
    ("--ctx 2kk", "2kk"),
    ("--ctx 2048.5", "2048.5"),
    ("--ctx k", "k"),
    ("--ctx 512,1024", "512,1024"),
    ("--ctx 1000000000000000", "1000000000000000"),
    ("--grad-accum 0", "0"),
    ("--grad-accum -3", "-3"),
    ("--grad-accum many", "many"),
    ("--grad-accum 2.5", "2.5"),
    ("--grad-accum 10000000000000", "10000000000000"),
    ("--gpus 8xH100 --pp 2 --micro-batches 10000000000000", "10000000000000"),
    ("--global-batch 20 --gpus 8", "use 16 or 24"),
    ("--global-batch 3 --bs 4", "use 4"),
    ("--global-batch 8 --grad-accum 2", "--grad-accum"),
    ("--global-batch some", "some"),
    ("--lora --rank 0", "0"),
    ("--lora --rank -8", "-8"),
    ("--lora --rank 100000", "100000"),
    ("--lora --rank r16", "r16"),
    ("--lora --rank 8.5", "8.5"),
    ("--lora -r sixteen", "sixteen"),
    ("--lora --alpha -1", "-1"),
    ("--lora --alpha x", "x"),
    ("--lora --dropout 1", "1"),
    ("--lora --dropout -0.1", "-0.1"),
    ("--lora --dropout 1.5", "1.5"),
    ("--lora --dropout half", "half"),
    ("--lora --dropout nan", "nan"),
    ("--lora --adapters 0", "0"),
    ("--lora --adapters two", "two"),
    ("--method prompt --virtual-tokens 0", "0"),
    ("--method prefix --virtual-tokens lots", "lots"),
    ("--qlora --group-size 0", "0"),
    ("--qlora --group-size big", "big"),
    ("--target-ctx 0", "0"),
    ("--target-ctx long", "long"),
    ("--lengths 1,0,3", "0"),
    ("--lengths 12,x", "x"),
    ("--lengths ,", ","),
    ("--checkpointing every:0", "0"),
    ("--checkpointing every:-2", "-2"),
    ("--checkpointing every:x", "x"),
    ("--checkpointing every:", "every:"),
    ("--nodes 0", "0"),
    ("--nodes x", "x"),
)
BAD_NAMES = _flags(
    ("--precision bf17", "bf17"),
    ("--precision 16", "16"),
    ("--precision bf16,fp32", "bf16,fp32"),
    ("--precision ''", "''"),
    ("--attention flash9", "flash9"),
    ("--attention flsh", "flsh"),
    ("--loss cross", "cross"),
    ("--loss hf,chunked", "hf,chunked"),
    ("--kernels ligr", "ligr"),
    ("--kernels cuda", "cuda"),
    ("--optimizer adamx", "adamx"),
    ("--optimizer adamw,sgd", "adamw,sgd"),
    ("--optimizer 8bit", "8bit"),
    ("--checkpointing some", "some"),
    ("--checkpointing full:2", "full:2"),
    ("--checkpointing sqrt:3", "sqrt:3"),
    ("--checkpointing 2", "2"),
    ("--stack hf-1999", "hf-1999"),
    ("--method loar", "loar"),
    ("--method q", "q"),
    ("--quant nf5", "nf5"),
    ("--qlora --quant nf3", "nf3"),
    ("--qlora --quant int5", "int5"),
    ("--offload disk", "disk"),
    ("--offload optimizer,disk", "disk"),
    ("--lora --adapter-dtype int8", "int8"),
    ("--lora --adapter-dtype floaty", "floaty"),
    ("--lora --targets nonsense", "nonsense"),
    ("--lora --targets ,", ","),
    ("--lora --targets all-linear,q_proj", "all-linear"),
    ("--gpu RTX9090", "RTX9090"),
    ("--gpu ''", "''"),
    ("--gpu potato", "potato"),
    ("--gpu A100,H100", "A100,H100"),
    ("--gpus 2xPotato", "Potato"),
    ("--gpus x", "x"),
    ("--gpus 0", "0"),
    ("--gpus 8 --nodes 3", "3"),
    ("--gpus 8 --zero 4", "4"),
    ("--gpus 8 --zero x", "x"),
    ("--gpus 8 --tp 3", "3"),
    ("--gpus 8 --fsdp --ddp", "ddp"),
    ("--gpus 8 --sharding hybrid", "hybrid"),
    ("--gpus 8 --fsdp --sharding half", "half"),
    ("--gpus 8 --fsdp --shard-size 3", "3"),
    ("--gpus 8 --zero 2 --hpz 4", "4"),
    ("--gpus 8 --ep 3", "3"),
    ("--gpus 8 --fsdp --wrap blocks", "blocks"),
    ("--gpus 8 --fsdp --reduce-dtype int8", "int8"),
    ("--gpus 8 --nvme states", "states"),
    ("--gpus 8 --bucket-mb 0", "0"),
    ("--network 400", "400"),
    ("--host-ram 2TiB", "2TiB"),
    ("--gpus 4 --pp 4 --pp-schedule x", "x"),
    ("--gpus 4 --cp 4 --cp-kind x", "x"),
    ("--gpus 4 --pp 4 --pp-chunks 2", "2"),
    ("--gpus -1", "-1"),
    ("--nodes 2", "2"),
    ("--vram 0", "0"),
    ("--vram -24", "-24"),
    ("--vram 24XB", "24XB"),
    ("--vram much", "much"),
    ("--vram 1e30", "1e30"),
    ("--gpu H100 --display mac", "mac"),
    ("--gpu H100 --mig 9g.99gb", "9g.99gb"),
    ("--gpu H100 --mig half", "half"),
    ("--gpu 4090 --mig 1g.5gb", "1g.5gb"),
    ("--gpu 4090 --allocator expandable:True", "expandable:True"),
    ("--allocator max_split_size_mb:1", "max_split_size_mb:1"),
    ("--allocator max_split_size_mb:x", "max_split_size_mb:x"),
    ("--allocator expandable_segments", "expandable_segments"),
    ("--allocator garbage_collection_threshold:2", "2"),
    ("--allocator roundup_power2_divisions:3", "3"),
    ("--allocator ''", "--allocator"),
    ("--timeline step.gif", "step.gif"),
    ("--timeline step", "step"),
    ("--timeline ''", "--timeline"),
)
CONTRADICTIONS = _flags(
    ("--qlora --full", "--qlora --full"),
    ("--full --lora", "--full --lora"),
    ("--lora --method full", "--lora --full"),
    ("--method lora --method ia3", "ia3"),
    ("--full --rank 16", "--rank '16'"),
    ("--rank 16", "--rank '16'"),
    ("--targets q_proj", "q_proj"),
    ("--dropout 0.1", "0.1"),
    ("--full --adapter-dtype bf16", "bf16"),
    ("--rslora", "--rslora"),
    ("--train-modules lm_head", "lm_head"),
    ("--full --quant nf4", "nf4"),
    ("--quant int8", "int8"),
    ("--qlora --quant none", "none"),
    ("--lora --double-quant", "--double-quant"),
    ("--lora --no-kbit", "--kbit"),
    ("--double-quant", "--double-quant"),
    ("--group-size 64", "64"),
    ("--lora --keep-modules lm_head", "lm_head"),
    ("--qlora --quant int8 --double-quant", "int8"),
    ("--lora --freeze lm_head", "lm_head"),
    ("--method ia3 --rank 8", "--rank '8'"),
    ("--method prompt --dropout 0.1", "0.1"),
    ("--method prefix --alpha 4", "4"),
    ("--lora --virtual-tokens 8", "8"),
    ("--bs 1 --bs 2", "'2'"),
    ("--ctx 1k --ctx 2k", "'2k'"),
    ("--clip --no-clip", "--no-clip"),
    ("--no-packing --packing", "--packing"),
    ("--json --explain", "--json"),
    ("--eval --train-mode", "--eval"),
    ("--optimizer-in-backward --grad-accum 4", "--grad-accum 1"),
    ("--prefetch 2", "'2'"),
    ("--no-pinned", "--pinned"),
    ("--offload-style trl", "trl"),
    ("--offload none --prefetch 1", "--prefetch"),
    ("--optimizer-in-backward --offload optimizer", "offload.optimizer"),
    ("--offload parameters", "--offload optimizer,parameters"),
    ("--offload checkpoints", "--checkpointing offload"),
    ("--images 1", "reads no images"),
    ("--checkpointing selective:nothing", "'nothing'"),
    ("--gpus 8x", "8x"),
    ("--qlora --group-size 63", "63"),
    ("--mig 3g.40gb", "3g.40gb"),
    ("--vram 24 --mig 1g.5gb", "1g.5gb"),
    ("--display windows", "windows"),
    ("--gpu A100 --gpu H100 --vram 24", "24"),
    ("--gpu A100 --gpu H100 --mig 1g.5gb", "1g.5gb"),
    ("--gpu A100 --gpus 1xH100", "1xH100"),
    ("--gpu A100 --gpu H100 --timeline x.html", "x.html"),
    ("--calibration c.json", "c.json"),
    ("--arch L2␣h64", "--arch"),
    ("--hub --model", "--model"),
)
UNKNOWN_WORDS = [
    Broken(("--bs", "4"), "--model"),
    Broken(("phi-4-multimodal", "--images", "8"), "no rules"),
    Broken(("gpt2", "--qlora", "--quantize-experts"), "has none"),
    Broken(("nemotron-h-8b", "--gpus", "2xh100", "--cp", "2"), "carries a state"),
    Broken(("--modle", "llama-7b"), "--modle"),
    Broken(("--model", "llama-7b", "--qlroa"), "--qlroa"),
    Broken(("--model", "llama-7b", "-z"), "-z"),
    Broken(("--model", "llama-7b", "--json=here"), "here"),
    Broken(("--model", "llama-7b", "--no-json"), "--no-json"),
    Broken(("--model", "llama-7b", "stray.yaml", "more.yaml"), "stray.yaml"),
    Broken(("--model",), "--model"),
    Broken(("--model", ""), "''"),
    Broken(("--model", " "), "' '"),
    Broken(("--model", "llama-8"), "llama-8"),
    Broken(("--model", "lamma-7b"), "lamma-7b"),
    Broken(("--model", "gpt5-9000b"), "gpt5-9000b"),
    Broken(("--model", "meta-llama/Llama-9-7b"), "Llama-9-7b"),
    Broken(("--model", "llama-7b,gpt2"), "llama-7b,gpt2"),
    Broken(("--model", "llama\n7b\x1b[31m"), "llama"),
    Broken(("--model", "x" * 5000), "xxx"),
    Broken(("--model", "llama-7b\x00"), "llama-7b"),
    Broken(("--model", "./llama-7b"), "./llama-7b"),
    Broken(("--model", "/no/such/folder"), "/no/such/folder"),
    Broken(("--model", "~/no/such/config.json"), "~/no/such/config.json"),
    Broken(("--model", "missing.json"), "missing.json"),
    Broken(("--model", "模型"), "模型"),
    Broken(("--model", "\udcff\udcfe"), "udcff"),
    Broken(("trian",), "trian"),
    Broken(("estimate",), "estimate"),
    Broken(("modles", "qwen"), "modles"),
    Broken(("models", "no-such-model-anywhere"), "no-such-model-anywhere"),
    Broken(("models", "--frob"), "--frob"),
    Broken(("models", "--json=1"), "1"),
    Broken(("gpus", "no-such-gpu"), "no-such-gpu"),
    Broken(("gpus", "--min-memory", "lots"), "lots"),
    Broken(("gpus", "--min-memory", "9000GiB"), "9000GiB"),
    Broken(("gpus", "--min-memory"), "--min-memory"),
    Broken(("version", "now"), "now"),
    Broken(("missing.yaml",), "missing.yaml"),
    Broken(("no/such/job",), "no/such/job"),
    Broken(("--hub", "--model", "a/b/c"), "a/b/c"),
    Broken(("--hub", "--model", "../../etc/passwd"), "../../etc/passwd"),
    Broken(("--hub", "--model", "org/na me"), "org/na me"),
    Broken(("--hub", "--model", "org/name@../x"), "org/name@../x"),
    Broken(("--hub", "--arch", "L2 h64 a2"), "L2 h64 a2"),
    Broken(("--model", "llama-7b", "--arch", "L2 h64 a2"), "L2 h64 a2"),
]
ARCHES = [
    Broken(("--arch", text), quoted)
    for text, quoted in (
        ("", "''"),
        ("   ", "' "),
        ("L32", "h"),
        ("h4096", "L"),
        ("L32 h4096 a33", "a33"),
        ("L32 h4096 a32 kv5", "kv5"),
        ("L0 h4096 a32", "L0"),
        ("L32 h-4096 a32", "h-4096"),
        ("L3.5 h4096 a32", "L3.5"),
        ("L32 h4096 a32 L33", "L33"),
        ("L32 h4096 a32 q8", "q8"),
        ("L? h4096 a32", "L?"),
        ("L32 h4096 a? ffn16384", "a?"),
        ("L32 h4096 a32 tied untied", "untied"),
        ("L32 h4096 a32 gelu gated", "gelu"),
        ("L32 h4096 a32 encoder decoder", "decoder"),
        ("L32 h4096 a32 mqa kv8", "kv8"),
        ("L32 h4096 a32 moe", "moe"),
        ("L32 h4096 a32 moe0x2", "moe0x2"),
        ("L32 h4096 a32 moe8x9", "moe8x9"),
        ("L32 h4096 a32 moe8xx", "moe8xx"),
        ("L32 h4096 a32 v", "'v'"),
        ("L32 h4096 a32 v99999999999999", "v99999999999999"),
        ("L32 h4096 a32 sparkly", "sparkly"),
        ("L32h4096a32", "L32h4096a32"),
        ("L32 h100", "h100"),
        ("L32 h4096 a32 kv8 gelu", "kv8"),
        ("MPT L2 h64 a2 f100", "f100"),
        ("MPT L2 h64 a2 dh16", "dh16"),
        ("L32 h4096 a32 learned-pos alibi", "alibi"),
        ("(all of it)", "(all of it)"),
        ("L32 h4096 a32 f0", "f0"),
        ("L1e9 h4096", "L1e9"),
        ("L32 h4096 a32 v-32000", "v-32000"),
        ("llama gpt2 L2 h64 a2", "gpt2"),
        ("L32 h4096 a64k", "a64k"),
    )
]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def _config(quoted: str, **changes: object) -> Broken:
    """A small Llama config with some fields changed (None removes one)."""
    values = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    return Broken(("--model", "@config.json"), quoted, (("config.json", json.dumps(values)),))


def _file(name: str, content: object, quoted: str, *argv: str) -> Broken:
    return Broken(argv or ("--model", f"@{name}"), quoted, ((name, content),))


def sparse(size: int) -> Callable[[Path], None]:
    """A file that says it is large and takes no disk."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return make


def folder(path: Path) -> None:
    path.mkdir()


def adapter_folder(path: Path) -> None:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")


def folder_with_folder(path: Path) -> None:
    (path / "config.json").mkdir(parents=True)


def unreadable(path: Path) -> None:
    path.write_text(json.dumps(LLAMA))
    path.chmod(0)


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def circular(path: Path) -> None:
    path.symlink_to(path)


def pipe(path: Path) -> None:
    os.mkfifo(path)


CONFIG_VALUES = [
    *(
        _config("c2p", model_type="deberta-v2", relative_attention=True, pos_att_type=kinds)
        for kinds in ("p2p", "", [], ["p2p"])
    ),
    _config("-64", hidden_size=-64),
    _config("0", hidden_size=0),
    _config("64.5", hidden_size=64.5),
    _config("'64'", hidden_size="64"),
    _config("True", hidden_size=True),
    _config("hidden_size", hidden_size=None),
    _config("[64]", hidden_size=[64]),
    _config("hidden_size", hidden_size=float("nan")),
    _config("hidden_size", hidden_size=float("inf")),
    _config("num_attention_heads=5", num_attention_heads=5),
    _config("num_key_value_heads=3", num_key_value_heads=3),
    _config("num_key_value_heads=8", num_key_value_heads=8),
    _config("num_hidden_layers", num_hidden_layers=None),
    _config("num_hidden_layers=0", num_hidden_layers=0),
    _config("num_hidden_layers=-2", num_hidden_layers=-2),
    _config("vocab_size", vocab_size=None),
    _config("vocab_size=1.5", vocab_size=1.5),
    _config("vocab_size", vocab_size=10**30),
    _config("vocab_size", vocab_size={"a": 1}),
    _config("intermediate_size", intermediate_size=None),
    _config("intermediate_size=-1", intermediate_size=-1),
    _config("head_dim", head_dim=0),
    _config("head_dim", head_dim="big"),
    _config("'yes'", tie_word_embeddings="yes"),
    _config("attention_bias", attention_bias=2),
    _config("attention_dropout", attention_dropout="x"),
    _config("'lama'", model_type="lama"),
    _config("None", model_type=None),
    _config("7", model_type=7),
    _config("''", model_type=""),
    _config("['llama']", model_type=["llama"]),
]
CONFIG_FILES = [
    _file("config.json", "", "config.json"),
    _file("config.json", "{", "config.json"),
    _file("config.json", '{"model_type": "llama",}', "config.json"),
    _file("config.json", "{'model_type': 'llama'}", "config.json"),
    _file("config.json", "[]", "config.json"),
    _file("config.json", "null", "config.json"),
    _file("config.json", "3", "config.json"),
    _file("config.json", '"llama"', "config.json"),
    _file("config.json", "{}", "None"),
    _file("config.json", b"\xff\xfe{\x00", "config.json"),
    _file("config.json", b"\x80\x81", "config.json"),
    _file("config.json", b"PK\x03\x04" + b"\x00" * 50, "config.json"),
    _file("config.json", "[" * 100_000, "config.json"),
    _file("config.json", '{"a":' * 50_000, "config.json"),
    _file("config.json", '{"hidden_size": ' + "9" * 5000 + "}", "config.json"),
    _file("config.json", json.dumps(LLAMA) + "garbage", "config.json"),
    _file("config.json", sparse(10 * 2**30), "10737418240"),
    _file("model.safetensors", sparse(2**30), "1073741824", "--model", "@./model.safetensors"),
    _file("model", folder, "model", "--model", "@model"),
    _file("model", adapter_folder, "adapter", "--model", "@model"),
    _file("model", folder_with_folder, "folder", "--model", "@model"),
    _file("config.json", unreadable, "permission denied"),
    _file("config.json", dangling, "config.json"),
    _file("config.json", circular, "config.json"),
    _file("config.json", pipe, "not a regular file"),
    _file("config.json", "model_type: llama\n", "config.json"),
]
SPECIAL_FILES = [
    Broken(("--model", "/dev/zero"), "/dev/zero"),
    Broken(("--model", "/dev/null"), "/dev/null"),
    Broken(("/dev/zero",), "/dev/zero"),
    Broken(("/",), "folder"),
]


def _job(text: str, quoted: str, *argv: str) -> Broken:
    return Broken(("@job.yaml", *argv), quoted, (("job.yaml", text),))


OWN_JOBS = [
    _job("", "job.yaml"),
    _job("# nothing\n", "job.yaml"),
    _job("just words", "just words"),
    _job("- a\n- b\n", "['a', 'b']"),
    _job("3", "3"),
    _job("a: [1,", "job.yaml"),
    _job("a: b: c", "job.yaml"),
    _job("\tmodel: llama-7b", "job.yaml"),
    _job("model: &x [*x]\n", "job.yaml"),
    _job("!!python/object/apply:os.system ['true']", "job.yaml"),
    _job("model: !!python/name:os.system", "job.yaml"),
    _job("model: llama-7b\nbs: 0\n", "0"),
    _job("model: llama-7b\nbs: [1, 2]\n", "[1, 2]"),
    _job("model: llama-7b\nbs: true\n", "True"),
    _job("model: llama-7b\nbs: 1.5\n", "1.5"),
    _job("model: llama-7b\nbs: .nan\n", "nan"),
    _job("model: llama-7b\nbs: .inf\n", "inf"),
    _job("model: llama-7b\nbs: {a: 1}\n", "{'a': 1}"),
    _job("model: llama-7b\nbatchsize: 2\n", "batchsize"),
    _job("model: llama-7b\nbs: 2\nmicro_batch_size: 4\n", "micro_batch_size"),
    _job("modle: llama-7b\n", "modle"),
    _job("bs: 2\n", "--model"),
    _job("model: 7\n", "7"),
    _job("model: [a]\n", "['a']"),
    _job("model: lama-9\n", "lama-9"),
    _job("model: llama-7b\narch: L2 h64 a2\n", "L2 h64 a2"),
    _job("config: llama\n", "llama"),
    _job("config: {model_type: llama}\n", "hidden_size"),
    _job("config: {model_type: nope}\n", "nope"),
    _job("model: llama-7b\nmethod: qlra\n", "qlra"),
    _job("model: llama-7b\nmethod: [full, lora]\n", "--full --lora"),
    _job("model: llama-7b\nrank: 8\n", "8"),
    _job("model: llama-7b\nmethod: lora\nrank: x\n", "x"),
    _job("model: llama-7b\nmethod: lora\ntargets: {}\n", "{}"),
    _job("model: llama-7b\npacking: maybe\n", "maybe"),
    _job("model: llama-7b\nprecision: 16\n", "16"),
    _job("model: llama-7b\nprecision: [bf16]\n", "['bf16']"),
    _job("model: llama-7b\nquant: nf4\n", "nf4"),
    _job("model: llama-7b\ngpu: 4090000\n", "4090000"),
    _job("model: llama-7b\ngpu: H1000\n", "H1000"),
    _job("model: llama-7b\nvram: -3\n", "-3"),
    _job("model: llama-7b\nvram: [24]\n", "[24]"),
    _job("model: llama-7b\ncheckpointing: every\n", "every"),
    _job("model: llama-7b\noffload: 3\n", "3"),
    _job("model: llama-7b\nlengths: [1, two]\n", "two"),
    _job("model: llama-7b\nlengths: {}\n", "{}"),
    _job("model: llama-7b\noptimizer: 3\n", "3"),
    _job("model: llama-7b\neval: sometimes\n", "sometimes"),
    _job("model: llama-7b\n", "--bs '0'", "--bs", "0"),
    _job(
        "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c"
        " [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e"
        " [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nmodel: [*e,*e]\n",
        "job.yaml",
    ),
    _job("{" * 3000, "job.yaml"),
    _job("model: 'llama-7b\n", "job.yaml"),
    _job("model: llama-7b\x07\n", "job.yaml"),
    _file("job.yaml", b"model: \xff\xfe\n", "job.yaml", "@job.yaml"),
    _file("job.json", "{", "job.json", "@job.json"),
    _file(
        "job.yaml", "ENV_VARS: {A: 1}\nMODEL_ARGS: {trainer.devices: 8}\n", "NeMo's", "@job.yaml"
    ),
    _file("job.yaml", "ENV_VARS: {A: 1}\nMODEL_ARGS:\n", "no argument", "@job.yaml"),
    _file("job.json", "[1]", "job.json", "@job.json"),
    _file("job.json", '{"model": "llama-7b", "bs": -1}', "-1", "@job.json"),
    _file("job.yaml", folder, "job.yaml", "@job.yaml"),
    _file("job.yaml", unreadable, "permission denied", "@job.yaml"),
    _file("job.yaml", sparse(2**34), "17179869184", "@job.yaml"),
    _job("model: 2020-01-01\n", "2020"),
    _job("? [a, b]\n: c\n", "a"),
    _job("model: llama-7b\nbs: 1\n---\nmodel: gpt2\n", "job.yaml"),
]
AXOLOTL = "base_model: llama-7b\nmicro_batch_size: 1\n"
TRAINER = "model_name_or_path: llama-7b\nper_device_train_batch_size: 2\n"
FACTORY = "model_name_or_path: llama-7b\ncutoff_len: 1024\n"
TUNE = "model: {_component_: torchtune.models.llama2.%s}\nbatch_size: 2\n"
FOREIGN_JOBS = [
    _job("base_model: nobody/nothing-7b\n", "nothing-7b"),
    _job(AXOLOTL + "adapter: dora\n", "dora"),
    _job(AXOLOTL + "load_in_4bit: true\nload_in_8bit: true\n", "load_in_8bit"),
    _job(AXOLOTL + "load_in_4bit: true\n", "adapter"),
    _job(AXOLOTL + "adapter: qlora\nload_in_8bit: true\n", "load_in_8bit"),
    _job(AXOLOTL + "adapter: lora\nlora_r: big\n", "big"),
    _job(AXOLOTL + "sequence_len: long\n", "long"),
    _job("base_model: llama-7b\nmicro_batch_size: zero\n", "zero"),
    _job(AXOLOTL + "optimizer: shampoo\n", "shampoo"),
    _job(AXOLOTL + "flash_attention: true\nxformers_attention: true\n", "xformers_attention"),
    _job(AXOLOTL + "gradient_checkpointing_kwargs: 3\n", "3"),
    _job(AXOLOTL + "sample_packing: perhaps\n", "perhaps"),
    _job(AXOLOTL + "bf16: sure\n", "sure"),
    _job("base_model: [a]\n", "['a']"),
    _job(AXOLOTL + "adapter: lora\nlora_dropout: 2\n", "2"),
    _job(AXOLOTL + "attn_implementation: magic\n", "magic"),
    _job(TRAINER + "bf16: true\nfp16: true\n", "fp16"),
    _job(TRAINER + "load_in_4bit: true\n", "use_peft"),
    _job(TRAINER + "load_in_4bit: true\nload_in_8bit: true\n", "load_in_8bit"),
    _job(TRAINER + "optim: magic\n", "magic"),
    _job(TRAINER + "gradient_accumulation_steps: 0\n", "0"),
    _job(TRAINER + "max_length: -5\n", "-5"),
    _job(TRAINER + "use_peft: true\nlora_r: 0\n", "0"),
    _job(TRAINER + "loss_type: huber\n", "huber"),
    _job(TRAINER + "bf16: 7\n", "7"),
    _job(TRAINER + "attn_implementation: paper\n", "paper"),
    _job("per_device_train_batch_size: 2\n", "--model"),
    _job("model_name_or_path: who/knows\n", "who/knows"),
    _job(TRAINER + "load_in_4bit: true\nuse_peft: true\nbnb_4bit_quant_type: nf3\n", "nf3"),
    _job(FACTORY + "finetuning_type: magic\n", "magic"),
    _job(FACTORY + "finetuning_type: full\nquantization_bit: 4\n", "quantization_bit"),
    _job(FACTORY + "quantization_bit: 3\n", "3"),
    _job(FACTORY + "lora_rank: -1\n", "-1"),
    _job(FACTORY + "bf16: true\nfp16: true\n", "fp16"),
    _job("model_name_or_path: llama-7b\ncutoff_len: wide\n", "wide"),
    _job("stage: sft\nmodel_name_or_path: unknown/model-1b\n", "model-1b"),
    _job(FACTORY + "flash_attn: fast\n", "fast"),
    _job(TUNE % "nothing_7b", "nothing_7b"),
    _job("model: {_component_: x.lora_llama2_7b}\n", "lora_attn_modules"),
    _job("model: {_component_: x.lora_llama2_7b, lora_attn_modules: q_proj}\n", "q_proj"),
    _job(TUNE % "llama2_7b" + "dtype: int4\n", "int4"),
    _job(TUNE % "llama2_7b" + "optimizer: {_component_: x.Magic}\n", "x.Magic"),
    _job(TUNE % "llama2_7b" + "optimizer: adamw\n", "adamw"),
    _job("model: {_component_: x.llama2, embed_dim: 64}\n", "num_attention_heads"),
    _job(
        TUNE % "llama2_7b" + "optimizer_in_bwd: true\ngradient_accumulation_steps: 2\n",
        "--grad-accum 1",
    ),
    _job("train_micro_batch_size_per_gpu: 2\n", "--model"),
    _job("compute_environment: LOCAL_MACHINE\n", "--model"),
    _job("zero_optimization: {stage: 4}\n", "4"),
    _job("zero_optimization: {stage: auto}\n", "auto"),
    _job("zero_optimization: {stage: 3, offload_param: {device: disk}}\n", "disk"),
    _job("zero_optimization: {stage: 2, reduce_bucket_size: big}\n", "big"),
    _job("compute_environment: LOCAL_MACHINE\ndistributed_type: MEGATRON_LM\n", "MEGATRON_LM"),
    _job(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:"
        " {fsdp_sharding_strategy: HALF}\n",
        "HALF",
    ),
    _job("compute_environment: LOCAL_MACHINE\nmixed_precision: bf15\n", "bf15"),
    _job(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:"
        " {zero_stage: 7}\n",
        "7",
    ),
    _job("peft_type: LORA\nr: 8\n", "adapter"),
    _job("model_type: llama\n", "job.yaml"),
]
CALIBRATIONS = [
    Broken(
        ("--model", "llama-7b", "--gpu", "H100", "--calibration", "@c.json"),
        quoted,
        (("c.json", text),),
    )
    for text, quoted in (
        ("{}", "napkinmath_calibration"),
        ("[]", "c.json"),
        ("{", "c.json"),
        ('{"napkinmath_calibration": 99}', "napkinmath_calibration"),
        ('{"napkinmath_calibration": 2, "gpu": "A100-80"}', "A100-80"),
        ('{"napkinmath_calibration": 2, "gpu": "H9000"}', "H9000"),
        ('{"napkinmath_calibration": 2, "gpu": "H100"}', "rates"),
        ('{"napkinmath_calibration": 2, "gpu": "H100", "rates": {"warp_speed": 9}}', "warp_speed"),
        ('{"napkinmath_calibration": 2, "gpu": "H100", "rates": {"stream_bytes_per_s": -1}}', "-1"),
        ('{"napkinmath_calibration": 2, "gpu": "H100", "rates": {"matmul_flops_per_s": 3}}', "3"),
        (
            (
                '{"napkinmath_calibration": 2, "gpu": "H100", "rates": {"matmul_flops_per_s":'
                ' {"bf16": "fast"}}}'
            ),
            "fast",
        ),
    )
] + [
    Broken(
        ("--model", "llama-7b", "--gpu", "H100", "--calibration", "no-such.json"), "no-such.json"
    )
]

CORPUS: list[Broken] = [
    *BAD_NUMBERS,
    *BAD_NAMES,
    *CONTRADICTIONS,
    *UNKNOWN_WORDS,
    *ARCHES,
    *CONFIG_VALUES,
    *CONFIG_FILES,
    *SPECIAL_FILES,
    *OWN_JOBS,
    *FOREIGN_JOBS,
    *CALIBRATIONS,
]
