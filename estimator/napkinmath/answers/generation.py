"""Inference on its own: what an engine takes of a GPU, how many sequences its cache holds, and how
long a token takes."""

from __future__ import annotations

from napkinmath.answers.figures import Verdict
from napkinmath.answers.generation_config import check_format, computed_in
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.catalog.engines import find_engine, find_served_format, kernels_of
from napkinmath.config.parallel_config import ParallelConfig
from napkinmath.lowering.parallel.tensor_share import valid_degrees
from napkinmath.lowering.rollout.pages import pages_of
from napkinmath.lowering.rollout.served import Serving, served
from napkinmath.timing.communicators import communicator_bytes
from napkinmath.timing.efficiency import default_efficiency
from napkinmath.timing.serving import EngineClock, engine_cluster

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.generation_config import GenerationConfig
    from napkinmath.catalog.engines import Engine
    from napkinmath.config.hardware import Hardware
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.lowering.rollout.pages import Pages
    from napkinmath.lowering.rollout.served import ServedModel
    from napkinmath.timing.serving import ForwardTime

# Bytes of a row of logits while tokens are drawn: 16 bits, their fp32 copy, its softmax
# (vllm v1/sample/sampler.py Sampler.forward).
_LOGIT_BYTES = 10
_LONGEST = 1 << 24  # tokens; no context is searched beyond
_DEGREES = (1, 2, 4, 8)
_MOST_CHUNKS = 256  # of a prompt, each with a price of its own


class BatchSpeed(Record):
    """`sequences` at once, each of them asked anew as soon as it ends."""

    sequences: int
    first_token_s: float
    """Of a prompt that comes while the others generate."""
    token_s: float
    """Between two tokens, the prompts of others in between included."""
    tokens_per_s: float
    requests_per_s: float
    money: float | None = None
    """For a million generated tokens."""


class Generation:
    """The answer for one model, engine and GPU (or tensor-parallel ranks of it)."""

    def __init__(self, spec: ModelSpec, config: GenerationConfig, hardware: Hardware) -> None:
        config.validate()
        self.spec, self.hardware = spec, hardware
        self.engine: Engine = find_engine(config.engine)
        self.config = config = config.replace(dtype=computed_in(config, self.engine, hardware))
        check_format(config, self.engine, hardware)
        named = find_served_format(config.quantization) if config.quantization else None
        self.format = kernels_of(named, hardware.gpu) if named else None
        self.defaults = self.engine.defaults_on(hardware.gpu)
        if config.receive_every > 1 and not self.engine.polls:
            raise InputError(
                f"estimate generate --receive-every {config.receive_every}: {self.engine.name} looks"
                " for requests before every forward; leave it out, or use --engine sglang"
            )
        self.model: ServedModel = served(
            spec,
            Serving(
                weights=self.format,
                dtype=config.dtype,
                cache_format=config.cache_format,
                ranks=config.ranks,
                merges=self.engine.merges,
                paged=bool(self.engine.block_tokens),
            ),
        )
        if self.model.encoder and not self.engine.runs_encoders:
            raise InputError(
                f"{self.engine.name} serves no encoder beside a decoder, as {spec.name} has; use"
                " engine hf"
            )
        if self.format and not any(p.packed for layer in self.model.layers for p in layer.products):
            raise InputError(
                f"weights in {self.format.name}: of {spec.name} nothing is packed in it, which packs"
                " experts alone; use another --quant"
            )
        self.cluster = engine_cluster(hardware, config.ranks)
        self._clock: EngineClock | None = None
        self._pages: Pages | None = None

    # ------------------------------------------------------------ memory, of one rank

    @property
    def whole(self) -> int:
        """Tokens of a sequence when it ends."""
        return self.config.prompt + self.config.completion

    @property
    def asked_sequences(self) -> int:
        """Sequences that may run at once."""
        return self.config.sequences or self.defaults.sequences

    @property
    def chunk(self) -> int:
        """Tokens of prompts that one forward reads at most."""
        asked = self.config.prefill_tokens or self.defaults.prefill_tokens
        if not self.engine.block_tokens:
            return self.config.prompt * self.config.beams * max(1, self.config.sequences)
        return asked

    @property
    def activation_bytes(self) -> int:
        """The most that one forward holds: a chunk of prompts, or the logits of all sequences.

        Of a layer its input, the widest product and what comes out of it; of an expert layer for each
        expert that a token visits.
        """
        size = 4 if self.config.dtype == "fp32" else 2
        widest = max(
            sum(max(p.visited, 1) * (p.n + p.n // 2) for p in layer.products[index : index + 1])
            for layer in self.model.layers
            for index in range(max(len(layer.products), 1))
            if layer.is_layer
        )
        forward = self.chunk * size * (widest + 3 * self.model.hidden)
        rows = min(self.asked_sequences, self.chunk)
        if not self.engine.block_tokens:
            rows = self.config.beams * max(1, self.config.sequences)
        return max(forward, rows * self.model.vocabulary * _LOGIT_BYTES)

    @property
    def _graphs_to(self) -> int:
        asked = self.config.graphs_to
        return self.engine.graphs_to(self.hardware.gpu, self.spec.family, asked)

    @property
    def graph_bytes(self) -> int:
        """CUDA graphs of all captured batch sizes."""
        if not (self.engine.graphs and self.config.graphs):
            return 0
        largest = self.config.graphs_to or min(self._graphs_to, self.asked_sequences)
        first, each = self.engine.graph_bytes
        return first + each * self.engine.captured(largest)

    @property
    def allowed_bytes(self) -> int:
        """What the engine may take of the device, graphs beside it or within."""
        whole = self.hardware.memory_bytes
        share = self.config.memory_share or self.engine.memory_share
        if share:
            return int(whole * share)
        return whole - self.defaults.reserved_bytes

    @property
    def context_bytes(self) -> int:
        """The process and its communicators."""
        mesh = ParallelConfig(tensor_parallel_size=self.config.ranks)
        return self.hardware.context_bytes + communicator_bytes(self.cluster, mesh)

    @property
    def fixed_bytes(self) -> int:
        """All that is no cache, within what the engine may take."""
        graphs = self.graph_bytes if self.engine.share_holds_graphs else 0
        held = self.context_bytes + self.model.weight_bytes + graphs
        # a share that leaves memory free holds activations there (sglang mem_fraction_static)
        return held + (0 if self.defaults.reserved_bytes else self.activation_bytes)

    @property
    def cache_bytes(self) -> int:
        """What is left for the cache; negative where the rest is too large."""
        return self.allowed_bytes - self.fixed_bytes

    @property
    def device_bytes(self) -> int:
        """On the device when the engine runs."""
        if not self.engine.block_tokens:
            return self.fixed_bytes + self.sequence_bytes(self.whole) * max(
                1, self.config.sequences
            )
        beside = 0 if self.engine.share_holds_graphs else self.graph_bytes
        beside += self.activation_bytes if self.defaults.reserved_bytes else 0
        return max(self.fixed_bytes, self.allowed_bytes) + beside

    # ------------------------------------------------------------ what the cache holds

    @property
    def pages(self) -> Pages | None:
        """The pages of the cache; None where it grows with the sequences."""
        if self.engine.block_tokens and self._pages is None:
            self._pages = pages_of(self.model, self.engine.block_tokens)
        return self._pages

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of one sequence of `tokens` tokens, every beam, in pages where the engine has
        them."""
        prompt = self.config.prompt if self.model.encoder else 0
        if self.pages is None:
            return self.config.beams * self.model.cached(tokens, prompt)
        shared = (
            self.pages.of_sequence(self.config.shared_prefix) if self.config.shared_prefix else 0
        )
        own = max(1, self.pages.of_sequence(tokens) - shared)
        return self.config.beams * own * self.pages.block_bytes

    @property
    def fitting_sequences(self) -> int:
        """Whole sequences that the cache holds at once."""
        free = self.cache_bytes
        if self.config.shared_prefix and self.pages is not None:
            free -= self.pages.of_sequence(self.config.shared_prefix) * self.pages.block_bytes
        return max(0, free) // max(1, self.sequence_bytes(self.whole))

    @property
    def running_sequences(self) -> int:
        """Sequences that run at once at most: what the cache holds, and the engine's limit."""
        return min(self.fitting_sequences, self.asked_sequences)

    @property
    def longest_context(self) -> int | None:
        """The longest single sequence; 0 where none fits. Where the cache holds any length, it is
        what the model's config has positions for, None where it says none."""
        low, high = 0, self.spec.longest_sequence or _LONGEST
        if not self.spec.longest_sequence and self.sequence_bytes(_LONGEST) <= self.cache_bytes:
            return self.spec.positions or None
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequence_bytes(middle) <= self.cache_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def verdict(self) -> Verdict:
        """Whether the engine starts, and as many sequences run as were asked for."""
        wanted = self.config.sequences or 1
        fits = self.fitting_sequences >= wanted and self.device_bytes <= self.hardware.memory_bytes
        return Verdict.FITS if fits else Verdict.DOES_NOT_FIT

    # ------------------------------------------------------------ time

    @property
    def clock(self) -> EngineClock | None:
        """Prices forwards; None where the GPU's speeds are not known."""
        gpu = self.hardware.gpu
        if not gpu.dense_flops or not gpu.bandwidth_bytes_per_s:
            return None
        if self._clock is None:
            self._clock = EngineClock(
                self.model,
                self.engine,
                default_efficiency(gpu),
                self.cluster,
                graphs=self.config.graphs,
                prompts_held=0 if self.config.graphs_decode else self._graphs_to,
                draft=self.config.draft,
            )
        return self._clock

    def prompt_s(self, prompts: int = 1, running: int = 0) -> float:
        """Seconds of reading `prompts` prompts, a chunk at a time; `running` other sequences get a
        token with every chunk."""
        return sum(times * each.seconds for times, each in self.chunks(prompts, running))

    def chunks(self, prompts: int = 1, running: int = 0) -> list[tuple[int, ForwardTime]]:
        """The forwards that read `prompts` prompts, each with how many are priced as it: of very
        many chunks a stretch of them takes as long as the one in its middle."""
        assert self.clock is not None
        found: list[tuple[int, ForwardTime]] = []
        done, prompt = self.config.shared_prefix, self.config.prompt
        rows, context = running * self.config.beams, self._halfway
        per_prompt = max(1, (self.chunk - (rows if self.engine.mixes else 0)) // prompts)
        stretch = -(-(prompt - done) // (per_prompt * _MOST_CHUNKS))
        while done < prompt:
            now = min(prompt - done, per_prompt)
            times = min(stretch, (prompt - done) // now)
            before = done + (times - 1) * now // 2
            if rows:
                forward = self.clock.mixed(now, before, rows, context, prompts=prompts)
            else:
                forward = self.clock.prefill(now, before, prompts=prompts)
            found.append((times, forward))
            done += times * now
        return found

    @property
    def _halfway(self) -> int:
        return self.config.prompt + self.config.completion // 2

    def token(self, sequences: int) -> ForwardTime:
        """One token of each sequence, halfway through their completions."""
        assert self.clock is not None
        rows = sequences * self.config.beams
        return self.clock.decode(rows, self._halfway)

    def token_s(self, sequences: int) -> float:
        """The same in seconds, with what drafted tokens save."""
        assert self.clock is not None
        rows = sequences * self.config.beams
        return self.clock.token_s(rows, self._halfway)

    def speed(self, sequences: int, price: float | None = None) -> BatchSpeed:
        """`sequences` at once in a steady state: while one is read, the others wait."""
        token, others = self.token_s(sequences), sequences - 1
        together = self._together(others)
        read = self.chunks(together, others)
        first = sum(times * forward.seconds for times, forward in read)
        waited = (first - token * sum(times for times, _ in read)) / together
        between = token + others / self.config.completion * max(0.0, waited)
        front = self.engine.front_s + self.engine.text_s * self.config.prompt
        first_token = front + first + self._wait_s(first, token, between, others)
        request = first_token + (self.config.completion - 1) * between
        rate = sequences / request * self.config.completion
        return BatchSpeed(
            sequences=sequences,
            first_token_s=first_token,
            token_s=between,
            tokens_per_s=rate,
            requests_per_s=sequences / request,
            money=None if price is None else price * self.config.ranks / (rate * 3600) * 1e6,
        )

    def _together(self, others: int) -> int:
        """Prompts that one forward reads: those that came since the engine last looked."""
        came = others * self.config.receive_every / self.config.completion
        fit = self.chunk // self.config.prompt
        return max(1, min(round(came), fit)) if self.config.receive_every > 1 else 1

    def _wait_s(self, first: float, token: float, between: float, others: int) -> float:
        """What a prompt waits for: the rest of the forward that runs when it comes, prompts that came
        before it and fill a forward, and tokens until the engine looks for it. It is the mean queue where reading takes a constant time
        (Pollaczek and Khinchine)."""
        if not others:
            return 0.0
        reading = min(0.95, 1 - token / between) if between > token else 0.0
        filled = min(1.0, self.config.prompt / self.chunk)
        rest = reading * first / (1 - reading * filled) + (1 - reading) * token
        return (rest + (self.config.receive_every - 1) * token) / 2

    def speeds(self, price: float | None = None) -> list[BatchSpeed]:
        """From one sequence, doubling, to the most that run at once."""
        most = self.config.sequences or self.running_sequences
        if self.clock is None or most < 1:
            return []
        sizes = [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]
        return [self.speed(size, price) for size in sizes]

    def within(self, token_s: float) -> int:
        """The most sequences that keep the time between two tokens; 0 where one alone takes
        longer."""
        low, high = 0, self.running_sequences
        while low < high:
            middle = (low + high + 1) // 2
            if self.speed(middle).token_s <= token_s:
                low = middle
            else:
                high = middle - 1
        return low

    # ------------------------------------------------------------ other placements

    def over(self, ranks: int) -> Generation:
        """The same over other tensor-parallel ranks."""
        return Generation(self.spec, self.config.replace(ranks=ranks), self.hardware)

    def in_format(self, name: str) -> Generation:
        """The same with weights stored so."""
        return Generation(self.spec, self.config.replace(quantization=name), self.hardware)

    def formats(self) -> list[Generation]:
        """The same in other formats that the engine serves there: 16 bits, FP8 where the GPU
        multiplies it, 4 bits."""
        gpu = self.hardware.gpu
        four = self.engine.served_on(gpu, ("awq-int4", "gptq-int4"))[:1]
        eight = self.engine.served_on(gpu, ("fp8",) if gpu.supports("fp8") else ())
        wanted = ("", *eight, *four)
        own = self.config.quantization.removesuffix("-block")
        return [self.in_format(name) for name in wanted if name != own]

    def placements(self) -> list[Generation]:
        """The same over 1, 2, 4 and 8 GPUs, where they divide the model."""
        found: list[Generation] = []
        for ranks in valid_degrees(self.spec, max(_DEGREES)):
            if ranks not in _DEGREES:
                continue
            try:
                found.append(self if ranks == self.config.ranks else self.over(ranks))
            except InputError:  # a model whose states are not split
                continue
        return found
