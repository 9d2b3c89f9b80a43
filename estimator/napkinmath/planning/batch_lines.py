"""BatchLines: lines of JSON read into families of jobs, most of them without parsing JSON at all.

Lines of one file mostly differ in a few numbers. A line is split at "bs", "ctx", "rank" and "id";
what is left is its template, which is parsed once. A line that does not match a template that was
checked goes through the JSON parser.
"""

from __future__ import annotations

import json
import re

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.base.json_input import NotJson, loads
from napkinmath.base.units import MIB
from napkinmath.inputs.asked import no_context
from napkinmath.inputs.several import OPEN
from napkinmath.planning.grid import Family

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MOST_FAMILIES = 512
MOST_BYTES = MIB  # of one line
MOST_RANK = 1 << 16
_OPEN_FIELDS = re.compile(rb'"(bs|ctx|rank|id)": ?("[ !#-\[\]-~]*"|0|[1-9][0-9]{0,11})')
_NAMES = {b"bs": 0, b"ctx": 1, b"rank": 2}


class Template:
    """What a line is without its open numbers: its family, which size stands in which part of the
    line, and the sizes it does not give."""

    __slots__ = ("family", "id_at", "places", "sizes")

    def __init__(
        self,
        family: Family,
        sizes: tuple[int, int, int],
        places: tuple[tuple[int, int], ...],
        id_at: int,
    ) -> None:
        self.family, self.sizes, self.places, self.id_at = family, sizes, places, id_at


class Jobs:
    """Jobs of one family in a chunk: where their lines are, their three sizes, and their ids as
    JSON text ('' where there is none)."""

    __slots__ = ("family", "ids", "places", "sizes")

    def __init__(self, family: Family) -> None:
        self.family = family
        self.places: list[int] = []
        self.sizes: tuple[list[int], list[int], list[int]] = ([], [], [])
        self.ids: list[str] = []

    def add(self, place: int, sizes: tuple[int, int, int], name: str) -> None:
        """Adds one line's job."""
        self.places.append(place)
        self.ids.append(name)
        for column, size in zip(self.sizes, sizes, strict=True):
            column.append(size)


class BatchLines:
    """Reads lines into jobs; options of the command line hold where a line says nothing. `notes`
    receives what was decided."""

    def __init__(self, given: Mapping[str, object], notes: list[str]) -> None:
        self.given, self.notes = dict(given), notes
        self._families: dict[str, Family | str] = {}
        self._templates: dict[tuple[bytes, ...], Template | None] = {}

    def read(self, chunk: list[bytes], rejects: dict[int, str]) -> Iterator[Jobs]:
        """The jobs of consecutive lines, many of one family at a time; `rejects` receives why the
        other lines are none, and empty lines are neither. At most MOST_FAMILIES are held."""
        split, templates = _OPEN_FIELDS.split, self._templates
        matched: dict[int, tuple[Template, list[int], list[list[bytes]]]] = {}
        others: list[int] = []
        for place, line in enumerate(chunk):
            parts = split(line)
            key = (*parts[::3], *parts[1::3])
            template = templates[key] if key in templates else self._learn(key, line, parts)
            if template is None:
                others.append(place)
                continue
            found = matched.get(id(template))
            if found is None:
                if len(matched) >= MOST_FAMILIES:
                    yield from _joined(matched.values(), others)
                    matched.clear()
                found = matched[id(template)] = (template, [], [])
            found[1].append(place)
            found[2].append(parts)
        yield from _joined(matched.values(), others)
        matched.clear()
        yield from self._parsed(chunk, others, rejects)

    def _parsed(
        self, chunk: list[bytes], others: list[int], rejects: dict[int, str]
    ) -> Iterator[Jobs]:
        groups: dict[int, Jobs] = {}
        for place in others:
            if not chunk[place].strip():
                continue
            try:
                family, sizes, name = self._parse(chunk[place])
            except InputError as error:
                rejects[place] = str(error)
                continue
            if id(family) not in groups and len(groups) >= MOST_FAMILIES:
                yield from groups.values()
                groups.clear()
            groups.setdefault(id(family), Jobs(family)).add(place, sizes, name)
        yield from groups.values()

    def _learn(self, key: tuple[bytes, ...], line: bytes, parts: list[bytes]) -> Template | None:
        """The template of a line, kept for the next; None where lines like it have to be parsed."""
        if len(self._templates) >= 4 * MOST_FAMILIES:
            self._templates.clear()
        found = self._template(line, parts[1::3], parts[2::3])
        self._templates[key] = found
        return found

    def _template(self, line: bytes, names: list[bytes], texts: list[bytes]) -> Template | None:
        if len(set(names)) < len(names) or any(
            name in _NAMES and text[:1] == b'"' for name, text in zip(names, texts, strict=True)
        ):
            return None
        try:
            content = values.mapping(loads(line), "line")
            plain = all(
                json.loads(text) == content.get(name.decode())
                for name, text in zip(names, texts, strict=True)
            )
        except ValueError:  # InputError and NotJson too
            return None
        if (
            not plain
            or "arch" in {**self.given, **content}
            or any(
                key in content for key in ("bs", "ctx", "rank", "id") if key.encode() not in names
            )
        ):
            return None
        try:
            family, sizes, _ = self._parse(line)
        except InputError:
            return None  # the numbers may be to blame: each such line is looked at
        places = tuple((_NAMES[name], 3 * i + 2) for i, name in enumerate(names) if name in _NAMES)
        id_at = 3 * names.index(b"id") + 2 if b"id" in names else 0
        if family.config.adapter is None and b"rank" in names:
            return None
        return Template(family, sizes, places, id_at)

    def _parse(self, line: bytes) -> tuple[Family, tuple[int, int, int], str]:
        """A line through the JSON parser."""
        if len(line) > MOST_BYTES:
            raise InputError(f"the line has more than {MOST_BYTES} bytes, which no job takes")
        try:
            content = loads(line)
        except NotJson as error:
            raise InputError(f"the line {error}") from None
        if not isinstance(content, dict):
            raise InputError(
                f'{shown(content, limit=40)} is not an object; write e.g. {{"model": "llama-7b",'
                ' "bs": 4}'
            )
        found = values.mapping(content, "line")  # pyright: ignore[reportUnknownArgumentType]
        name = json.dumps(found.pop("id")) if "id" in found else ""
        from napkinmath.inputs.job_file import own_options

        options = {**self.given, **own_options(found, "line")}
        family = self._family(options)
        if "ctx" in options and family.has_own_length:
            note = no_context(family.template.spec)
            self.notes += [note] if note not in self.notes else []
        sizes = [
            (
                values.count(options[key], "--" + key, high=MOST_RANK if key == "rank" else 1 << 40)
                if key in options
                else own
            )
            for key, own in zip(OPEN, family.sizes, strict=True)
        ]
        return family, (sizes[0], sizes[1], sizes[2]), name

    def _family(self, options: dict[str, object]) -> Family:
        """The family of these options, its first job with the sizes that are the defaults of
        all."""
        alike = {key: value for key, value in options.items() if key not in OPEN}
        if "ctx" in options and ("arch" in options or "audio" in options):
            alike["ctx"] = options["ctx"]  # a table's length; a second length of a sound is refused
        if "rank" in options:
            alike["rank"] = 16  # so that a rank that means nothing here is refused
        key = json.dumps(alike, sort_keys=True, default=str)
        found = self._families.get(key)
        if found is None:
            if len(self._families) >= MOST_FAMILIES:
                self._families.clear()
                self._templates.clear()
            try:
                found = Family(alike, self.notes)
            except InputError as error:
                found = str(error)
            self._families[key] = found
        if isinstance(found, str):
            raise InputError(found)
        return found


def _joined(
    matched: Iterable[tuple[Template, list[int], list[list[bytes]]]], others: list[int]
) -> list[Jobs]:
    """The jobs of lines with a template by family; `others` receives those whose numbers are out of
    range."""
    groups: dict[int, Jobs] = {}
    for template, places, lines in matched:
        jobs = groups.setdefault(id(template.family), Jobs(template.family))
        others += _add_matched(jobs, template, places, lines)
    return list(groups.values())


def _add_matched(
    jobs: Jobs, template: Template, places: list[int], lines: list[list[bytes]]
) -> list[int]:
    """Adds the lines of a template; returns the places of those whose numbers are out of range."""
    columns = [[size] * len(places) for size in template.sizes]
    for index, at in template.places:
        columns[index] = [int(parts[at]) for parts in lines]
    at = template.id_at
    names = [parts[at].decode() for parts in lines] if at else [""] * len(places)
    outside: list[int] = []
    if min(map(min, columns)) < 1 or max(columns[2]) > MOST_RANK:
        for place, b, s, r, name in zip(places, *columns, names, strict=True):
            if min(b, s, r) < 1 or r > MOST_RANK:
                outside.append(place)
            else:
                jobs.add(place, (b, s, r), name)
        return outside
    jobs.places += places
    jobs.ids += names
    for mine, column in zip(jobs.sizes, columns, strict=True):
        mine += column
    return outside
