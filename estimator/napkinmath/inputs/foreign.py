"""What the readers of other tools' job files share: keys taken one by one, so that what became of
each is known."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.dtypes import BF16_CHECKPOINT, dtype_name
from napkinmath.base.errors import InputError, suggest
from napkinmath.config.job_keys import Difference, JobKey, JobKeys, KeyUse
from napkinmath.inputs.interpolation import interpolated
from napkinmath.inputs.known_keys import KnownKeys, known_keys
from napkinmath.inputs.option_table import MODEL_WAYS
from napkinmath.inputs.own_words import left_open
from napkinmath.inputs.run_keys import loader_workers, run_length

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_EXAMPLES = {"gpus": "N", "model": "NAME", "workload": "sft"}


class ForeignJob:
    """Another tool's job file: keys are taken, options and notes are given."""

    def __init__(
        self,
        tool: str,
        content: Mapping[str, object],
        notes: list[str],
        *,
        keys: str,
        path: str = "",
        text: str = "",
        given: Mapping[str, object] | None = None,
    ) -> None:
        self.tool, self.content, self.notes = tool, content, notes
        self.path, self.text = path, text
        self.given: Mapping[str, object] = given or {}
        """Options beside the file, which win over it."""
        self.trained_by = ""
        """The trainer that a script names: 'dpo', 'sft', 'trainer' for the Trainer itself."""
        self.program = self.code = ""
        """What a launch line starts, 'finetune.py', and the path of the code that was read with it; ''
        for a file."""
        self.options: dict[str, object] = {}
        self.engine = ""
        """The key that asks for an inference engine."""
        self.by_unsloth = self.follows_gpu = False
        self.transformers = ""
        """As in JobKeys."""
        self.assumed: set[str] = set()
        """Options whose value the file does not say."""
        self._keys, self._prefix = keys, ""
        self._taken: set[str] = set()
        self._left_out: dict[str, JobKey] = {}
        self._sections: list[ForeignJob] = []
        self._adopted: list[tuple[ForeignJob, str]] = []

    def take(self, *keys: str) -> object:
        """The first of these keys that has a value; None where none has."""
        found: object = None
        for key in keys:
            self._taken.add(key)
            value = self.content.get(key)
            if found is None and value is not None and value != "":
                found = value
        return found

    def switch(self, *keys: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.take(*keys)
        return default if value is None else values.switch(value, keys[0])

    def mapping(self, key: str) -> Mapping[str, object]:
        """A nested mapping; empty where absent."""
        value = self.take(key)
        return {} if value is None else values.mapping(value, key)

    def flatten(self) -> None:
        """Makes the file one level deep, 'section.key', as the tables of keys name what is nested.
        A mapping that a table knows by its own name is one key and stays whole; '${section.key}'
        is the value of that key."""
        known = known_keys(self._keys).known
        flat: dict[str, object] = {}
        ahead = [*self.content.items()][::-1]
        while ahead:
            name, value = ahead.pop()
            if not values.is_mapping(value) or not value or name in known:
                flat[name] = value
                continue
            inner = values.mapping(value, name)
            ahead += [(f"{name}.{key}", each) for key, each in inner.items()][::-1]
        self.content = interpolated(flat)

    def is_settled(self, option: str) -> bool:
        """Whether an option is given beside the file, so that what the file says of it is moot."""
        names = MODEL_WAYS if option == "model" else (option,)
        return any(name in self.given for name in names)

    def refuse(self, option: str, sentence: str) -> None:
        """Raises InputError with the option that is the way out, unless it is given already."""
        if not self.is_settled(option):
            flag = option.replace("_", "-")
            raise InputError(f"{sentence}; add --{flag} {_EXAMPLES.get(option, flag.upper())}")

    def section(self, key: str) -> ForeignJob:
        """A nested mapping, empty where absent, whose keys are taken one by one as well: dotted
        'key.name' where they are reported."""
        found = ForeignJob(
            self.tool, self.mapping(key), self.notes, keys=self._keys, given=self.given
        )
        found.options, found._prefix = self.options, f"{self._prefix}{key}."
        self._sections.append(found)
        return found

    def adopt(self, inner: ForeignJob, key: str = "") -> None:
        """The keys of a file that this one names, as its own: 'key.name'; without a key those that
        another reader took from this very file."""
        self._adopted.append((inner, key))

    def leave_out(
        self,
        key: str,
        why: str,
        *,
        memory: Difference = Difference.NONE,
        time: Difference = Difference.NONE,
        option: str = "",
        of_activations: bool = False,
    ) -> None:
        """Says that a key changes the run and is not priced with the value it has, unless `option`
        is given beside the file; `of_activations`: what it saves is of them alone."""
        self._left_out[key] = JobKey(
            name=f"{self._prefix}{key}",
            use=KeyUse.NOT_PRICED,
            why=why,
            memory=memory,
            time=time,
            option=option,
            of_activations=of_activations,
        )

    def dismiss(self, section: str, why: str, *, whole: bool = False) -> None:
        """Says that a part of the run is not there, so that what the table knows of its keys
        ('critic.') has no effect; with `whole` all that stands in it and is not read."""
        known = known_keys(self._keys).known
        for key in self.content:
            if key.startswith(section) and (key in known or (whole and key not in self._taken)):
                self._left_out[key] = JobKey(name=key, use=KeyUse.NO_EFFECT, why=why)

    def dismiss_alike(self, section: str, model: str) -> None:
        """Says of the keys of a section that are as those of another, which is priced, that they
        change nothing."""
        for key, value in self.content.items():
            other = model + key[len(section) :]
            if key.startswith(section) and self.content.get(other, self) == value:
                why = f"as {other}, which is priced for both"
                self._left_out[key] = JobKey(name=key, use=KeyUse.NO_EFFECT, why=why)

    def give(self, option: str, value: object) -> None:
        """Sets an option unless the value is None, or a list of modules that names none."""
        if value is not None and not (option == "train_modules" and value == []):
            self.options[option] = value

    def note(self, text: str) -> None:
        """Adds a note."""
        self.notes.append(f"{self.tool}: {text}")

    def assume(self, option: str, value: object, why: str) -> None:
        """Sets an option the file does not give, and says so."""
        self.options[option] = value
        self.assumed.add(option)
        self.note(f"{option} not given, taken as {value} ({why})")

    def finish(self) -> dict[str, object]:
        """The options, among them `job_keys`: what became of every key."""
        patched = self.options.get("kernels") == "unsloth" and "use_unsloth" in self.content
        if "workload" in self.options:
            # Without a word an option table's default would be TRL's head.
            self.options.setdefault("loss", "hf")
        keys = tuple(self._accounted(known_keys(self._keys)))
        self.options["job_keys"] = JobKeys(
            tool=self.tool,
            path=self.path,
            keys=keys,
            assumed=frozenset(self.assumed),
            run=run_length(self.content),
            workers=loader_workers(self.content),
            engine=self.engine,
            by_unsloth=self.by_unsloth or patched,
            follows_gpu=self.follows_gpu and not self.is_settled("precision"),
            transformers=self.transformers,
        )
        return self.options

    def _accounted(self, known: KnownKeys) -> Iterator[JobKey]:
        yield from (found for key, found in self._left_out.items() if key not in self.content)
        inner = {section._prefix[len(self._prefix) : -1] for section in self._sections}
        for key, value in self.content.items():
            name = f"{self._prefix}{key}"
            if key in self._left_out:
                yield self._left_out[key]
            elif key not in self._taken:
                found = known.of(name, value, self.content)
                if found.use is KeyUse.UNKNOWN:
                    option = left_open(name, value, self.given)
                    found = option or found.replace(why=self._near(known, name, key))
                yield found
            elif key not in inner or not value:
                yield JobKey(name=name, use=KeyUse.PRICED)
        for section in self._sections:
            yield from section._accounted(known)
        for job, key in self._adopted:
            for found in job._accounted(known_keys(job._keys)):
                yield found.replace(name=f"{key}.{found.name}" if key else found.name)

    def _near(self, known: KnownKeys, name: str, key: str) -> str:
        """The keys that an unknown one may mean; sought once, since a file may be read many
        times."""
        if name not in known.near:
            near = suggest(key, [*self._taken, *known.beside(name, self._prefix)])
            known.near[name] = near.removeprefix("; ")
        return known.near[name]


def precision_of(
    job: ForeignJob,
    *,
    bf16: bool,
    fp16: bool,
    tf32: bool,
    weights: str,
    quantized: bool,
    adapter: bool,
) -> str:
    """Our precision for a Trainer's bf16 / fp16 switches and the type weights are loaded in."""
    if bf16 and fp16:
        raise InputError("bf16 and fp16 are both true; keep one of them")
    kind = dtype_word(weights)
    full = kind == "fp32"
    if bf16 and not kind and not quantized:
        return BF16_CHECKPOINT
    if bf16:
        return "bf16-amp" if full and not quantized else "bf16-autocast"
    if fp16:
        return "fp16-autocast" if quantized or (adapter and not full) else "fp16-amp"
    if kind in ("bf16", "fp16"):
        return kind
    return "tf32" if tf32 else "fp32"


def dtype_word(value: object) -> str:
    """Our name of a dtype, other words in lower case; empty for None."""
    return "" if value is None else dtype_name(str(value))


# What a tool puts into PYTORCH_CUDA_ALLOC_CONF by itself, where the shell has not set it.
EXPANDABLE = "expandable_segments:True"


def attention_word(value: object) -> str | None:
    """Our name of a transformers attn_implementation."""
    if value is None:
        return None
    word = str(value).lower()
    if "flash" in word or word in ("fa2", "fa3"):
        return "flash3" if word.replace("_", "").endswith(("3", "3hub")) else "flash2"
    return {
        "disabled": "eager",
        "sdpa": "sdpa",
        "eager": "eager",
        "auto": "auto",
        "flex_attention": "flex",
    }.get(word, word)
