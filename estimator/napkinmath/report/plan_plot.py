"""A plan drawn: every candidate by memory and speed, those nothing beats in both joined by a line,
the best numbered as in the table and named."""

from __future__ import annotations

from napkinmath.base.units import GIB
from napkinmath.report.drawing import CHARACTER, FAINT, GRID_LINE, INK, PAPER, Canvas, check_file
from napkinmath.report.picture import number, ticks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.planning.plan import Candidate, Plan

    Point = tuple[float, float]

WIDTH, LEFT, RIGHT, TOP, PLOT_HEIGHT = 920, 84, 28, 92, 400
ROW_HEIGHT = 19
_COLORS = {"full": "#3b6fb6", "lora": "#c8781e", "qlora": "#3f8f4f"}
_OTHER = "#a04a9c"


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both: less memory and more speed; from little memory to
    much."""
    found: list[Point] = []
    for memory, speed in sorted(points, key=lambda p: (p[0], -p[1])):
        if not found or speed > found[-1][1]:
            found.append((memory, speed))
    return found


def write_plan_plot(plan: Plan, path: str, *, force: bool = False) -> None:
    """Draws the first machine's candidates into a .svg or .png; raises InputError where the file is
    there, has another suffix, or is a PNG without matplotlib."""
    check_file(path, force=force)
    plan_drawing(plan).write(path, force=force)


def plan_drawing(plan: Plan) -> Canvas:
    """The drawing of a plan."""
    return _Plane(plan).drawn()


class _Plane:
    """The candidates of the best plan's GPU, on axes of GiB and tokens/s."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        machine = plan.best[0].machine if plan.best else plan.space.machines[0]
        self.hardware = machine.hardware
        self.best = [
            (number, candidate)
            for number, candidate in enumerate(plan.best, 1)
            if candidate.machine is machine
        ]
        self.groups = self._by_method()
        points = [p for group in self.groups.values() for p in group]
        self.right = 1.04 * max([self.capacity, *(x for x, _ in points)])
        self.top = 1.08 * max([1.0, *(y for _, y in points)])
        self.bottom = TOP + PLOT_HEIGHT

    @property
    def capacity(self) -> float:
        """GiB of the GPU."""
        return self.hardware.memory_bytes / GIB

    def x(self, memory: float) -> float:
        """The pixel of so many GiB."""
        return LEFT + memory / self.right * (WIDTH - LEFT - RIGHT)

    def y(self, speed: float) -> float:
        """The pixel of so many tokens/s."""
        return self.bottom - speed / self.top * PLOT_HEIGHT

    def _by_method(self) -> dict[str, list[Point]]:
        """(GiB with the context, tokens/s) of the candidates, up to a third above the GPU's
        memory."""
        context, limit = self.hardware.context_bytes / GIB, 1.33 * self.capacity
        groups: dict[str, list[Point]] = {}
        for cloud in self.plan.clouds:
            if cloud.gpu == self.hardware.gpu.name:
                points = (
                    (nbytes / GIB + context, speed)
                    for nbytes, speed in zip(cloud.requested, cloud.tokens_per_s, strict=True)
                    if speed
                )
                method = str(dict(cloud.options).get("method", "full"))
                groups.setdefault(method, []).extend(p for p in points if p[0] < limit)
        return groups

    def drawn(self) -> Canvas:
        """Axes, dots, the line of those that nothing beats, the best and their names."""
        below = (
            f"{self.plan.num_candidates:,} candidates; each dot a batch of one combination, its"
            " requested bytes and the CUDA context"
        )
        height = self.bottom + 76 + ROW_HEIGHT * (len(self.best) + 1)
        title = f"{self.plan.space.spec.name}: speed against memory"
        drawing = Canvas(WIDTH, height, title, below)
        self._axes(drawing)
        for method, points in self.groups.items():
            self._dots(drawing, points, _COLORS.get(method, _OTHER))
        self._frontier(drawing)
        self._numbers(drawing)
        self._legend(drawing)
        self._table(drawing)
        return drawing

    def _axes(self, drawing: Canvas) -> None:
        for value in ticks(self.top):
            drawing.line([(LEFT, self.y(value)), (WIDTH - RIGHT, self.y(value))], GRID_LINE)
            drawing.text(LEFT - 8, self.y(value) + 4, number(value), anchor="end", color=FAINT)
        for value in ticks(self.right, most=9):
            across = self.x(value), self.bottom + 18
            drawing.text(*across, number(value), anchor="middle", color=FAINT)
        middle = (LEFT + WIDTH - RIGHT) / 2
        drawing.text(middle, self.bottom + 38, "GiB at the peak", anchor="middle", color=FAINT)
        drawing.text(
            24, TOP + PLOT_HEIGHT / 2, "tokens/s", anchor="middle", color=FAINT, upright=True
        )
        edge = self.x(self.capacity)
        drawing.line([(edge, TOP), (edge, self.bottom)], FAINT, width=1, dash="5 4")
        name = f"{self.hardware.gpu.name}, {self.capacity:.1f} GiB"
        drawing.text(edge + 5, self.bottom - 8, name, size=11, color=FAINT, halo=True)

    def _dots(self, drawing: Canvas, points: Sequence[Point], color: str) -> None:
        """One for each pixel that has a candidate."""
        pixels = dict.fromkeys((round(self.x(x)), round(self.y(y))) for x, y in points)
        for x, y in pixels:
            drawing.dot(x, y, 1.6, color)

    def _frontier(self, drawing: Canvas) -> None:
        fitting = [p for group in self.groups.values() for p in group if p[0] <= self.capacity]
        stairs: list[Point] = []
        for x, y in pareto(fitting):
            if stairs:
                stairs.append((self.x(x), stairs[-1][1]))
            stairs.append((self.x(x), self.y(y)))
        if len(stairs) > 1:
            drawing.line(stairs, INK)

    def _numbers(self, drawing: Canvas) -> None:
        """The best, numbered; numbers that would lie on one another move up."""
        taken: list[Point] = []
        for order, candidate in self.best:
            x, y = self._place(candidate)
            drawing.dot(x, y, 4, PAPER, INK)
            up = y - 8
            while any(abs(x - a) < 12 and abs(up - b) < 12 for a, b in taken):
                up -= 13
            taken.append((x, up))
            if up < y - 8:
                drawing.line([(x, y - 4), (x, up + 2)], FAINT, width=0.8)
            drawing.text(x, up, str(order), size=11, anchor="middle", bold=True, halo=True)

    def _place(self, candidate: Candidate) -> Point:
        held = candidate.estimate.peak.nbytes + candidate.machine.hardware.context_bytes
        return self.x(held / GIB), self.y(candidate.tokens_per_s)

    def _legend(self, drawing: Canvas) -> None:
        x, y = LEFT + 14.0, TOP + 14
        for method in self.groups:
            drawing.dot(x, y - 4, 4, _COLORS.get(method, _OTHER))
            drawing.text(x + 9, y, method, halo=True)
            x += 34 + 12 * CHARACTER * len(method)
        drawing.line([(x, y - 4), (x + 18, y - 4)], INK)
        drawing.text(x + 24, y, "nothing is faster in less", halo=True)

    def _table(self, drawing: Canvas) -> None:
        """What each of the best sets."""
        columns = ((LEFT, "end"), (LEFT + 62, "end"), (LEFT + 150, "end"), (LEFT + 170, "start"))
        y = self.bottom + 66
        for (x, anchor), head in zip(columns, ("", "GiB", "tokens/s", "set"), strict=True):
            drawing.text(x, y, head, anchor=anchor, color=FAINT)
        for order, candidate in self.best:
            y += ROW_HEIGHT
            device = candidate.estimate.memory.device.value / GIB
            changes = " ".join(candidate.changes) or "(as it is)"
            cells = str(order), f"{device:.1f}", f"{candidate.tokens_per_s:,.0f}", changes
            for (x, anchor), cell in zip(columns, cells, strict=True):
                drawing.text(x, y, cell, anchor=anchor, bold=x == LEFT)
