"""The palette: every role once, and neighbours that colour-blind readers can tell apart."""

from __future__ import annotations

import itertools

import pytest
from napkinmath.ir.ledger import Role
from napkinmath.report.palette import COLORS, STACK, ansi, rgb

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
DEFICIENCIES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
LEAST_DIFFERENCE = (
    18.0  # CIE76; about 2.3 is the least that an eye notices side by side, 10 is seen at a glance
)


def lab(color: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as an eye with that deficiency sees it."""
    linear = [
        (c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4)
        for c in rgb(color)
    ]
    r, g, b = (
        min(max(sum(m * c for m, c in zip(row, linear, strict=True)), 0.0), 1.0) for row in matrix
    )
    x, y, z = (
        0.4124 * r + 0.3576 * g + 0.1805 * b,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0193 * r + 0.1192 * g + 0.9505 * b,
    )
    fx, fy, fz = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116
        for v in (x / 0.95047, y, z / 1.08883)
    )
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("name", DEFICIENCIES)
def test_bands_that_can_touch_differ(name: str) -> None:
    """Bands within two places of each other touch where those between them are empty."""
    for distance in (1, 2):
        for one, other in zip(STACK, STACK[distance:], strict=False):
            p, q = (lab(COLORS[role], DEFICIENCIES[name]) for role in (one, other))
            difference = sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) ** 0.5
            assert difference >= LEAST_DIFFERENCE, (
                name,
                one.value,
                other.value,
                round(difference, 1),
            )


def test_every_role_is_stacked_once_and_has_a_colour_of_its_own() -> None:
    assert sorted(STACK) == sorted(Role)
    assert set(COLORS) == set(Role)
    assert all(one != other for one, other in itertools.combinations(COLORS.values(), 2))


def test_terminal_colours_are_the_nearest_of_the_256() -> None:
    assert ansi("#ff0000") == "38;5;196"
    assert ansi("#000000") == "38;5;16"
    assert len({ansi(color) for color in COLORS.values()}) == len(COLORS)
