"""The exit of a language model: final norm, language-model head and loss."""

from __future__ import annotations

from napkinmath.catalog.layers.norm import Norm
from napkinmath.catalog.layers.symbols import v
from napkinmath.dtypes import FP32
from napkinmath.ledger import Role, Value
from napkinmath.model_spec import Part
from napkinmath.ops.elementwise import cast, copy
from napkinmath.ops.loss import cross_entropy, linear_cross_entropy
from napkinmath.ops.matmul import linear
from napkinmath.tape import Tape
from napkinmath.train_config import Loss


class CausalLmHead(Part):
    """Norm, head and next-token loss."""

    norm: Norm | None = Norm()
    norm_name: str = "model.norm"
    tied_to: str = ""
    """Path of the embedding whose weight the head shares."""
    bias: bool = False
    name: str = "lm_head"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        assert x is not None
        with t.scope() as frame:
            frame.local(x)
            hidden = self.norm.record(t, x, self.norm_name) if self.norm else x
        stack = t.policy.stack
        with t.scope() as frame:
            frame.local(hidden)
            if t.policy.config.loss is not Loss.HF:
                with t.scope(self.name):
                    weight = self._weight(t, hidden)
                return linear_cross_entropy(t, hidden, weight)
            logits = linear(t, hidden, self.name, v, bias=self.bias, kind="head", role=Role.LOGITS, weight=self._tied(t, hidden))
            if stack.logits_upcast_in_model:
                logits = cast(t, logits, FP32, role=Role.LOGITS)
            frame.local(logits)
            if stack.logits_shift_copy:
                shifted = copy(t, logits, name="shifted logits")
                shifted.tensor.role = Role.LOGITS
                frame.local(shifted)
                logits = shifted
            return cross_entropy(t, logits, upcast=stack.logits_upcast, shifted=True)

    def _weight(self, t: Tape, hidden: Value) -> Value:
        return t.weight("weight", (v, hidden.axes[-1]), kind="head", tied_to=self.tied_to).value

    def _tied(self, t: Tape, hidden: Value):  # noqa: ANN202
        if not self.tied_to:
            return None
        with t.scope(self.name):
            return t.weight("weight", (v, hidden.axes[-1]), kind="head", tied_to=self.tied_to)
