"""Workload: what is trained besides plain next-token prediction, and what happens in the middle of
training."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.errors import InputError
from napkinmath.base.record import Record


class WorkloadKind(str, Enum):
    """The training method around the step; SFT is the step itself."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"
    ORPO = "orpo"
    SIMPO = "simpo"
    DISTILL = "distill"
    REWARD = "reward"
    PRM = "prm"
    GRPO = "grpo"
    DAPO = "dapo"
    DR_GRPO = "dr-grpo"
    GSPO = "gspo"
    RLOO = "rloo"
    PPO = "ppo"
    CONTRASTIVE = "contrastive"
    CONTRASTIVE_CACHED = "contrastive-cached"


class Head(str, Enum):
    """What a model ends in, in the place of head and next-token loss."""

    SCORE = "score"
    """One score for each sequence: a reward model, a critic."""
    TOKEN_SCORES = "token scores"
    """Two scores for each token: right or wrong after a step."""
    STUDENT = "student"
    """Its divergence from a teacher's logits."""
    LOGITS = "logits"
    """Logits and no loss."""
    HIDDEN = "hidden states"
    """What logits would be made of, and no logits."""
    LIKELIHOOD = "likelihood"
    """The log-probability of each label, of all logits at once."""
    COMPLETION = "completion"
    """The log-probabilities of a rollout's completion, whose logits alone are made."""
    KERNEL = "kernel"
    """The log-probability of each label of a rollout, by one kernel over all logits."""
    EMBEDDINGS = "embeddings"
    """One vector for each sequence."""
    ODDS_RATIO = "odds ratio"
    """The same, and the cross-entropy of the chosen half."""


class Placement(str, Enum):
    """Where the weights of a model that is not trained are."""

    AUTO = "auto"
    """As TRL's trainer of the workload has it under the engine."""
    SHARDED = "sharded"
    """Stored and gathered in units as the policy is."""
    WHOLE = "whole"
    """A whole copy on every rank."""
    OFFLOAD = "offload"
    """As AUTO, in host memory between uses."""
    SWAP = "swap"
    """In host memory between uses, and in the policy's place then, whose weights wait on the host."""
    APART = "apart"
    """On GPUs of its own: neither its memory nor its time are here."""


class RolloutSync(str, Enum):
    """What of the policy's weights is whole at once on its way to an inference engine."""

    PARAMETER = "parameter"
    """One parameter after the other."""
    LAYER = "layer"
    """The parameters of a layer; those outside the layers together."""
    BUCKET = "bucket"
    """One parameter, copied into a buffer that is sent when it is full."""
    WHOLE = "whole"
    """All of them."""


class RolloutOffload(str, Enum):
    """What of the policy waits on the host while an engine on its GPUs generates."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """States and master weights."""
    POLICY = "policy"
    """Parameters too, once they are sent."""


class WorkloadRule(Record):
    """What a kind of workload does around the step of its policy."""

    sequences: int = 1
    """Sequences that go through the model for one sample of the batch: a pair, or one."""
    head: Head | None = None
    """What the policy ends in, where it is not its own head."""
    opening: str = ""
    """A forward of the policy without gradients before the one that is trained on."""
    reference: tuple[str, ...] = ()
    """Names of the forwards of a reference."""
    holds: bool = False
    """The reference runs while the policy's activations are held; else before its forward."""
    refers: bool = True
    """Whether the method has a reference unless it is said otherwise."""
    reference_is_prepared: bool = True
    """The trainer shards the reference under FSDP."""
    second: str = ""
    """What the model given as teacher is."""
    critic: bool = False
    """A critic is trained beside the policy."""
    rolls_out: bool = False
    """Whether the step generates what it trains on."""
    scores_labels: bool = False
    """The trainer asks the model for its labels' log-probabilities, and not for logits (trl 1.16
    trainer/utils.py add_fused_lm_head)."""

    @property
    def takes_chunked_loss(self) -> bool:
        """Whether some trainer runs it without all logits by a switch: of SFT, and of labels' scores;
        trl's ORPO, CPO, PPO and GKD have none (trl 1.16 experimental/orpo, cpo, gkd)."""
        return self.scores_labels or self == WorkloadRule()


MAX_COLUMNS = 32
ELSEWHERE = "none"
"""Rollouts that are made neither on these GPUs nor in this step's time, as far as is priced."""
OLD_LOGPROBS = "log-probabilities of the rollout"
_GROUP = WorkloadRule(
    reference=("reference",), second="reward model", rolls_out=True, scores_labels=True
)
_PAIR = WorkloadRule(sequences=2, reference=("reference",), holds=True, scores_labels=True)
# Sources: trl 1.16 trainer/{dpo,kto,reward,grpo,rloo}_trainer.py _compute_loss,
# _generate_and_score_completions, experimental/{orpo,cpo,gkd}; trl 1.10 experimental/{prm,ppo}.
# DAPO and Dr. GRPO leave the KL term out (arXiv 2503.14476 section 2.3, 2503.20783); what else they
# and GSPO change are normalizers over (b, s) numbers, which have no effect on memory or time.
# sentence-transformers 6.2 losses/multiple_negatives_ranking.py; base/losses/gradcache.py, where a
# mini-batch goes forward without gradients and once more with them (arXiv 2101.06983).
RULES: dict[WorkloadKind, WorkloadRule] = {
    WorkloadKind.SFT: WorkloadRule(),
    WorkloadKind.DPO: _PAIR,
    WorkloadKind.KTO: WorkloadRule(
        opening="mismatched completions",
        reference=("reference of mismatched completions", "reference"),
        holds=True,
        scores_labels=True,
    ),
    WorkloadKind.ORPO: WorkloadRule(sequences=2, head=Head.ODDS_RATIO),
    WorkloadKind.SIMPO: WorkloadRule(sequences=2, head=Head.LIKELIHOOD),
    WorkloadKind.DISTILL: WorkloadRule(head=Head.STUDENT, second="teacher"),
    WorkloadKind.REWARD: WorkloadRule(sequences=2, head=Head.SCORE),
    WorkloadKind.PRM: WorkloadRule(head=Head.TOKEN_SCORES),
    WorkloadKind.GRPO: _GROUP,
    WorkloadKind.DAPO: _GROUP.replace(refers=False),
    WorkloadKind.DR_GRPO: _GROUP.replace(refers=False),
    WorkloadKind.GSPO: _GROUP,
    WorkloadKind.RLOO: _GROUP.replace(opening=OLD_LOGPROBS),
    WorkloadKind.CONTRASTIVE: WorkloadRule(head=Head.EMBEDDINGS),
    WorkloadKind.CONTRASTIVE_CACHED: WorkloadRule(
        head=Head.EMBEDDINGS, opening="embeddings without gradients"
    ),
    WorkloadKind.PPO: _GROUP.replace(critic=True, reference_is_prepared=False, scores_labels=False),
}


class Workload(Record):
    """Phases beside the step. The default is none of them."""

    kind: WorkloadKind = WorkloadKind.SFT
    columns: int = 2
    """Texts of one sample of a contrastive loss: anchor, positive, each negative."""
    teacher: str = ""
    """Catalogued name of the model that teaches (distill) or scores rollouts (grpo, ppo)."""
    teacher_topk: int = 0
    """A student learns from so many of a teacher's largest logits of each token. The teacher then
    takes the whole batch first, and teacher and student are on the GPUs in turn. 0: from all logits,
    beside its own."""
    reference: bool | None = None
    """The reference's log-probabilities are computed in the step; False: computed before training,
    or not needed (beta 0). None is the method's own way."""
    old_logprobs: bool | None = None
    """The policy scores its rollouts before the update (the old log-probabilities of the ratio).
    None is the method's own way, or that of the trainer whose engine generates."""
    scored_rows: int = 0
    """Rollouts that the forwards before the update take at a time, and that transformers generates at
    a time; 0: scored by micro-batches, generated all at once."""
    entropy_loss: bool = False
    """The loss of a rollout's update has the entropy of every token in it."""
    reference_at: Placement = Placement.AUTO
    teacher_at: Placement = Placement.AUTO
    completion_tokens: int = 0
    """Tokens that a rollout generates; 0 is half the sequence."""
    rollout: str = ""
    """What generates the rollouts: transformers' generate (hf), an engine of catalog/engines.py, or
    `ELSEWHERE`; empty is the rollout trainer's engine, hf without one."""
    rollout_trainer: str = ""
    """Row of catalog/rollout_trainers.py, which says what the fields below leave open; TRL's where
    an engine is named alone."""
    rollout_memory: float = 0.0
    """Share of the GPU that the engine takes; 0 is the trainer's."""
    rollout_tp: int = 0
    """Tensor-parallel ranks of an engine; 0 is the trainer's."""
    rollout_sleep: int | None = None
    """While the policy trains the engine 1: keeps its weights on the host, 2: drops them; the cache
    is freed in both. 0 keeps all, None is the trainer's."""
    rollout_gpus: str = ""
    """GPUs of its own, '2xH100'."""
    rollout_sync: RolloutSync | None = None
    """How weights come to the engine; None is the trainer's."""
    rollout_batches: int = 0
    """Batches in which the layers go to the engine, each whole at once; 0 is what `rollout_sync`
    says."""
    rollout_bucket: int = 0
    """Bytes of the buffer of `RolloutSync.BUCKET`; 0 is the trainer's."""
    rollout_offload: RolloutOffload | None = None
    """None is the trainer's."""
    rollout_staleness: int | None = None
    """Steps that rollouts may be behind the policy: engines on GPUs of their own generate while it
    trains. 0 is one after the other, None the trainer's."""
    rollout_group: int = 1
    """Completions of one prompt, which is read once for them."""
    rollout_draft: tuple[int, float] | None = None
    """Speculative decoding: tokens drafted at a time, the share of them that is accepted."""
    eval_batch: int = 0
    """Sequences of an evaluation in the middle of training; 0 is no evaluation."""
    generate_tokens: int = 0
    """Tokens generated for one micro-batch in the middle of training; 0 is none."""

    @property
    def rule(self) -> WorkloadRule:
        """What its kind does around the step."""
        return RULES[self.kind]

    @property
    def sequences(self) -> int:
        """Sequences that go through the model for one sample of the batch: a pair, or one."""
        return self.rule.sequences

    @property
    def texts(self) -> int:
        """Texts of a row of the batch that go through the model under one loss."""
        return self.columns if self.kind is WorkloadKind.CONTRASTIVE else 1

    @property
    def rolls_out(self) -> bool:
        """Whether the step generates what it trains on."""
        return self.rule.rolls_out

    @property
    def has_engine(self) -> bool:
        """Whether an inference engine generates the rollouts."""
        used = self.rollout or self.rollout_trainer or "hf"
        return self.generates and used != "hf"

    @property
    def generates(self) -> bool:
        """Whether generating the rollouts is part of the step that is priced."""
        return self.rolls_out and self.rollout != ELSEWHERE

    @property
    def may_refer(self) -> bool:
        """Whether a reference's forward is part of the step; of rollouts the trainer decides where
        nothing is said (lowering/workload.py refers)."""
        wanted = self.rule.refers if self.reference is None else self.reference
        return wanted and bool(self.rule.reference)

    @property
    def is_plain(self) -> bool:
        """Whether the step is all there is."""
        return self.kind is WorkloadKind.SFT and not self.eval_batch and not self.generate_tokens

    def validate(self) -> None:
        """Raises InputError for negative counts and for parts that the kind does not have."""
        counts = (self.completion_tokens, self.eval_batch, self.generate_tokens, self.teacher_topk)
        if min(counts) < 0:
            raise InputError(
                "completion_tokens, eval_batch, generate_tokens and teacher_topk are counts; use 0 for"
                " none"
            )
        if self.columns != 2 and self.kind is not WorkloadKind.CONTRASTIVE:
            raise InputError(
                f"--columns {self.columns}: {self.kind.value} embeds no texts of one sample together;"
                " use it with --workload contrastive"
            )
        if not 2 <= self.columns <= MAX_COLUMNS:
            raise InputError(
                f"--columns {self.columns} is out of range; use 2 (pairs) to {MAX_COLUMNS}"
            )
        if self.kind is WorkloadKind.DISTILL and not self.teacher:
            raise InputError("distillation needs a teacher; add --teacher MODEL")
        if self.teacher and not self.rule.second:
            takes = ", ".join(kind.value for kind, rule in RULES.items() if rule.second)
            raise InputError(
                f"a teacher has no part in {self.kind.value}; use --workload with one of {takes}"
            )
        if self.teacher_topk and self.kind is not WorkloadKind.DISTILL:
            raise InputError(
                f"--teacher-topk {self.teacher_topk}: {self.kind.value} has no student of a teacher's"
                " logits; use it with --workload distill"
            )
        self._validate_engine()
        if self.old_logprobs and not self.rolls_out:
            raise InputError(
                f"--old-logprobs: {self.kind.value} generates nothing that the policy could score;"
                " use it with --workload grpo, rloo or ppo"
            )
        if self.scored_rows and not self.rolls_out:
            raise InputError(
                f"--score-bs {self.scored_rows}: {self.kind.value} scores nothing before its update;"
                " use it with --workload grpo, rloo or ppo"
            )
        if self.entropy_loss and not self.rolls_out:
            raise InputError(
                f"--entropy-loss: {self.kind.value} updates on no rollouts; use it with --workload"
                " grpo, rloo or ppo and --rollout-trainer verl or openrlhf"
            )
        if self.reference_at is not Placement.AUTO and not self.may_refer:
            raise InputError(
                f"--reference-at {self.reference_at.value}: {self.kind.value} runs no reference"
                " here; leave it out, or use --workload dpo, kto, grpo or ppo with --reference"
            )
        if self.teacher_at is not Placement.AUTO and not self.teacher:
            raise InputError(
                f"--teacher-at {self.teacher_at.value} places no model; add --teacher MODEL"
            )
        if self.teacher_at is Placement.SWAP:
            raise InputError(
                "--teacher-at swap: only a reference has the policy's shapes and can take its place;"
                " use offload"
            )

    def _validate_engine(self) -> None:
        """Raises InputError for an engine where nothing is rolled out, and settings without one."""
        given = (("rollout", self.rollout), ("rollout-trainer", self.rollout_trainer))
        for name, value in given:
            if value not in ("", "hf", ELSEWHERE) and not self.rolls_out:
                raise InputError(
                    f"--{name} {value}: {self.kind.value} generates nothing; use it with"
                    " --workload grpo, rloo or ppo"
                )
        settings = (
            ("rollout-memory", self.rollout_memory or None),
            ("rollout-tp", self.rollout_tp or None),
            ("rollout-sleep", self.rollout_sleep),
            ("rollout-gpus", self.rollout_gpus or None),
            ("rollout-sync", self.rollout_sync),
            ("rollout-batches", self.rollout_batches or None),
            ("rollout-bucket", self.rollout_bucket or None),
            ("rollout-offload", self.rollout_offload),
            ("rollout-staleness", self.rollout_staleness),
            ("rollout-group", None if self.rollout_group == 1 else self.rollout_group),
            ("rollout-draft", self.rollout_draft),
        )
        for name, value in settings:
            if value is not None and not self.has_engine:
                raise InputError(
                    f"--{name} says nothing without an engine; add --rollout vllm or sglang"
                )
        if self.rollout_batches and self.rollout_sync not in (None, RolloutSync.LAYER):
            raise InputError(
                f"--rollout-batches has no part in --rollout-sync {self.rollout_sync.value}; use"
                " --rollout-sync layer"
            )
        if self.rollout_bucket and self.rollout_sync not in (None, RolloutSync.BUCKET):
            raise InputError(
                f"--rollout-bucket has no part in --rollout-sync {self.rollout_sync.value}; use"
                " --rollout-sync bucket"
            )
        if self.rollout_staleness and not self.rollout_gpus:
            raise InputError(
                f"--rollout-staleness {self.rollout_staleness}: engines on the policy's GPUs do not"
                " generate while it trains; add --rollout-gpus, e.g. 2xH100"
            )
        offloads = self.rollout_offload not in (None, RolloutOffload.NONE)
        if self.rollout_gpus and offloads and self.rollout_offload is not None:
            raise InputError(
                f"--rollout-offload {self.rollout_offload.value} makes room for an engine on the"
                " same GPUs; leave it out with --rollout-gpus"
            )
        if self.rollout_gpus and self.rollout_sleep:
            raise InputError(
                "--rollout-sleep frees memory for a training on the same GPUs; leave it out with"
                " --rollout-gpus"
            )
