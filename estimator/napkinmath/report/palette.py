"""One colour a role, the same in SVG, HTML, PNG and the terminal; distinct for colour-blind
readers too.

What stays for the whole run is blue, green or purple, what comes and goes with a step is yellow to
red, what no tensor explains is grey. Bands that can touch differ by at least 18 (CIE76) for normal
sight and each of three deficiencies: tests/report/test_palette.py.
"""

from __future__ import annotations

from napkinmath.ir.ledger import Role

# From the bottom of a stacked plot to its top: what never moves first.
STACK: tuple[Role, ...] = (
    Role.WEIGHTS,
    Role.QUANTIZATION,
    Role.ADAPTERS,
    Role.MASTER,
    Role.OPTIMIZER,
    Role.GRADIENTS,
    Role.COMMUNICATION,
    Role.ENGINE,
    Role.ACTIVATIONS,
    Role.ACTIVATION_GRADIENTS,
    Role.LOGITS,
    Role.WORKSPACE,
    Role.UNEXPLAINED,
    Role.SLACK,
    Role.CONTEXT,
)

COLORS: dict[Role, str] = {
    Role.WEIGHTS: "#5666ab",
    Role.QUANTIZATION: "#a5c0e6",
    Role.ADAPTERS: "#268338",
    Role.MASTER: "#6fc8ae",
    Role.OPTIMIZER: "#5b3a8c",
    Role.GRADIENTS: "#c77dc4",
    Role.COMMUNICATION: "#1c8f85",
    Role.ENGINE: "#2b3b63",
    Role.ACTIVATIONS: "#e3bb3c",
    Role.ACTIVATION_GRADIENTS: "#ac6a17",
    Role.LOGITS: "#f1887c",
    Role.WORKSPACE: "#8a1f3d",
    Role.UNEXPLAINED: "#e3e3e3",
    Role.SLACK: "#a3a3a3",
    Role.CONTEXT: "#6e6e6e",
}
# Good and bad news, and warnings, on a terminal: blue and orange rather than green and red.
GOOD, BAD, UNSURE, FAINT = "#3a8fd9", "#e06c2b", "#c9a227", "#8a8a8a"


def rgb(color: str) -> tuple[int, int, int]:
    """'#5666ab' -> (86, 102, 171)."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


_LEVELS = (0, 95, 135, 175, 215, 255)


def ansi(color: str) -> str:
    """The SGR parameters of the nearest colour of the 256 that every terminal knows."""
    indices = [min(range(6), key=lambda i: abs(_LEVELS[i] - part)) for part in rgb(color)]
    return f"38;5;{16 + 36 * indices[0] + 6 * indices[1] + indices[2]}"
