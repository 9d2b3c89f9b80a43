"""What a script does to its process, its libraries and its tokenizer, as far as that changes a step.

Sources: torch 2.9 cuda/memory.py set_per_process_memory_fraction, backends/cuda/__init__.py,
__init__.py set_float32_matmul_precision; liger-kernel 0.6 transformers/monkey_patch.py
apply_liger_kernel_to_*; transformers 5.23 tokenization_utils_base.py add_special_tokens.
"""

from __future__ import annotations

from napkinmath.inputs.scripts.python_values import Unknown, items_of, mapping_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from typing import Any

    from napkinmath.inputs.scripts.python_keys import ScriptKeys
    from napkinmath.inputs.scripts.python_values import Made

# Variables of the environment that torch's allocator reads.
_ALLOCATOR = ("os.environ.PYTORCH_CUDA_ALLOC_CONF", "os.environ.PYTORCH_ALLOC_CONF")
_VISIBLE = "os.environ.CUDA_VISIBLE_DEVICES"
_TF32 = "torch.backends.cuda.matmul.allow_tf32"
# Attention kernels that a script turns off: without both, scores are kept.
_SCORES_KEPT = {"enable_flash_sdp", "enable_mem_efficient_sdp"}
_LIGERS_PARTS = (
    *("rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "swiglu", "geglu"),
)


class Process:
    """Settings of the process, in the order of the text."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[object, int]] = {}
        """Key of a Trainer's file -> its value and line."""
        self.allocator: tuple[str, int] | None = None
        self.added_tokens = 0
        """Tokens that tokenizers are given at most."""
        self.adds_unknown = False
        """Whether they are given tokens that a run works out."""
        self.tokenizers: list[object] = []
        """What names the tokenizers that are loaded."""
        self._off: set[str] = set()

    def set(self, name: str, value: object, line: int) -> None:
        """An attribute, or an item of a mapping, by its dotted name."""
        if name in _ALLOCATOR and isinstance(value, str):
            self.allocator = value, line
        elif name == _VISIBLE and isinstance(value, str):
            if "," in value.strip(" ,"):
                self.found["visible_in_code"] = value, line
        elif name == _TF32 and isinstance(value, bool):
            self.found["tf32"] = value, line

    def call(
        self,
        name: str,
        given: list[Any],
        named: dict[str, Any],
        node: ast.Call,
        *,
        doubted: bool,
    ) -> None:
        """A call; `doubted` where only a run knows whether it is made."""
        owner, _, last = name.rpartition(".")
        first = given[0] if given else next(iter(named.values()), None)
        if last.startswith("apply_liger_kernel_to_"):
            self._liger(named, node, doubted=doubted)
        elif last == "from_pretrained" and owner.endswith("Tokenizer"):
            self.tokenizers.append(first)
        elif last in ("add_tokens", "add_special_tokens") and owner:
            self._count(first)
        elif last == "set_per_process_memory_fraction":
            self.found["memory_fraction"] = first if isinstance(first, float) else True, node.lineno
        elif last == "set_float32_matmul_precision" and first in ("high", "medium"):
            self.found["tf32"] = True, node.lineno
        elif last in _SCORES_KEPT and first is False:
            self._off.add(last)
            if self._off == _SCORES_KEPT:
                self.found["sdp_kernels_off"] = True, node.lineno
        elif name == "os.environ.setdefault" and len(given) == 2:
            self.set(f"os.environ.{first}", given[1], node.lineno)

    def _liger(self, named: dict[str, Any], node: ast.Call, *, doubted: bool) -> None:
        on: object = Unknown(source="a test", line=node.lineno) if doubted else True
        self.found["use_liger_kernel"] = on, node.lineno
        parts = {key: value for key, value in named.items() if key in _LIGERS_PARTS}
        if parts:
            self.found["liger_kernel_config"] = parts, node.lineno

    def _count(self, tokens: Any) -> None:
        """Tokens of a list, of a mapping of roles, or one."""
        words = mapping_of(tokens)
        for role, value in words.items():
            self._count(
                value if role in ("additional_special_tokens", "extra_special_tokens") else ""
            )
        if words:
            return
        several = items_of(tokens)
        if several is not None:
            self.added_tokens += len(several)
        elif isinstance(tokens, str):
            self.added_tokens += 1
        else:
            self.adds_unknown = True


def read_process(keys: ScriptKeys, process: Process) -> None:
    """The keys of a Trainer's file for what the process is set to; its arguments count before."""
    wide = "float32" in (keys.content.get("dtype"), keys.content.get("torch_dtype"))
    for key, (value, line) in process.found.items():
        if key not in {*keys.content, *keys.computed} and (wide or key != "tf32"):
            keys.set(key, value, line)


def read_vocabulary(keys: ScriptKeys, model: Made, process: Process) -> None:
    """Rows of a model's embeddings after resize_token_embeddings. A model's rows are at least the
    length of its tokenizer, so that len(tokenizer) has at most those and the tokens added."""
    size, line = model.keys.get("resized_vocabulary"), model.lines.get("resized_vocabulary", 0)
    by_tokenizer = model.keys.get("tokenizer_vocabulary")
    if size is None and by_tokenizer is None:
        return
    name = model.keys.get("model_name")
    its_own = all(
        one == name or (isinstance(one, Unknown) and isinstance(name, Unknown))
        for one in process.tokenizers
    )
    known = by_tokenizer == "length" and its_own and not process.adds_unknown
    if size is not None:
        keys.set("resized_vocabulary", size, line)
    elif known:
        keys.set("added_tokens", process.added_tokens, model.lines["tokenizer_vocabulary"])
    else:
        keys.set("tokenizer_vocabulary", True, model.lines["tokenizer_vocabulary"])
    if "vocabulary_multiple" in model.keys:
        keys.set("vocabulary_multiple", model.keys["vocabulary_multiple"], line)
