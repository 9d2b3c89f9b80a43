"""One colour a role, the same in SVG, HTML, PNG and the terminal; told apart by colour-blind readers too.

The hues follow Paul Tol's qualitative schemes (SRON/EPS/TN/09-002, issue 3.2): what stays for the whole run is blue to purple, what
comes and goes with a step is yellow to red, what no tensor explains is grey. Neighbours in STACK differ in lightness.
"""

from __future__ import annotations

from napkinmath.ledger import Role

# From the bottom of a stacked plot to its top: what never moves first.
STACK: tuple[Role, ...] = (
    Role.WEIGHTS,
    Role.QUANTIZATION,
    Role.ADAPTERS,
    Role.MASTER,
    Role.OPTIMIZER,
    Role.GRADIENTS,
    Role.COMMUNICATION,
    Role.ACTIVATIONS,
    Role.ACTIVATION_GRADIENTS,
    Role.LOGITS,
    Role.WORKSPACE,
    Role.UNEXPLAINED,
    Role.SLACK,
    Role.CONTEXT,
)

COLORS: dict[Role, str] = {
    Role.WEIGHTS: "#4477aa",
    Role.QUANTIZATION: "#99c5e8",
    Role.ADAPTERS: "#2a6f3f",
    Role.MASTER: "#7fb8ad",
    Role.OPTIMIZER: "#5b3a8c",
    Role.GRADIENTS: "#cc7fb4",
    Role.COMMUNICATION: "#1f8a99",
    Role.ACTIVATIONS: "#e5b93c",
    Role.ACTIVATION_GRADIENTS: "#b06a16",
    Role.LOGITS: "#f08a7c",
    Role.WORKSPACE: "#8a1f3d",
    Role.UNEXPLAINED: "#d9d9d9",
    Role.SLACK: "#8c8c8c",
    Role.CONTEXT: "#bfbfbf",
}
# Good and bad news, and warnings, on a terminal: blue and orange rather than green and red.
GOOD, BAD, UNSURE, FAINT = "#3a8fd9", "#e06c2b", "#c9a227", "#8a8a8a"


def rgb(color: str) -> tuple[int, int, int]:
    """'#4477aa' -> (68, 119, 170)."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


_LEVELS = (0, 95, 135, 175, 215, 255)


def ansi(color: str) -> str:
    """The SGR parameters of the nearest colour of the 256 that every terminal knows."""
    indices = [min(range(6), key=lambda i: abs(_LEVELS[i] - part)) for part in rgb(color)]
    return f"38;5;{16 + 36 * indices[0] + 6 * indices[1] + indices[2]}"
