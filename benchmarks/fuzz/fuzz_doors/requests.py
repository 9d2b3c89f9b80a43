"""Requests to the page's server, answered in this process: a path and a body of options."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from napkinmath.base.errors import NapkinError
from napkinmath.cli.main import DEFECT
from napkinmath.exports import KINDS
from napkinmath.serving import answers
from napkinmath.serving.requests import NUMBERS, SWITCHES, WORDS, options_of
from napkinmath.serving.workers import SECONDS_TO_SEARCH

from fuzz_doors.door import Case, Done, Door, signature
from fuzz_doors.draw import GPUS, MODELS, TINY_ARCH, argument, as_json, changed_tree, often, text
from fuzz_doors.flags import KNOWN

_SLOW = ("/api/limits", "/api/plan", "/api/details")
_QUICK = ("/api/estimate", "/api/command", *(f"/api/export/{kind}" for kind in KINDS))


def make(rng: Random) -> Case:
    """Mostly a move of a slider: a model, up to five options, seldom a changed or damaged body."""
    options: dict[str, Any] = (
        {"arch": TINY_ARCH[1]} if rng.random() < 0.6 else {"model": rng.choice(MODELS)}
    )
    if rng.random() < 0.25:
        options["gpu"] = rng.choice((rng.choice(GPUS), [rng.choice(GPUS)], rng.sample(GPUS, 2)))
    for name in rng.sample(sorted(SWITCHES | NUMBERS | WORDS - {"arch"}), rng.randrange(6)):
        options[name] = _value(rng, name)
    path = rng.choice(_SLOW if rng.random() < 0.06 else _QUICK)
    options |= {"goal": "tokens"} if often(rng, 0.3, "goal") and path == "/api/plan" else {}
    while rng.random() < 0.2:
        options = changed_tree(rng, options)
    path = path if rng.random() < 0.98 else "/api/export/" + text(rng)
    return Case(("POST", path), (("body", as_json(rng, options)),))


def _value(rng: Random, name: str) -> Any:
    if name in SWITCHES:
        return rng.random() < 0.5
    if name in NUMBERS:
        return rng.choice((1, 2, 3, 4, 8, 16, 64, 512, 2048))
    return argument(rng, *KNOWN.get("--" + name.replace("_", "-"), ("8", "full")))


def answered(case: Case, folder: Path) -> Done:
    """What the server's handler and its worker do between them."""
    path, body = case.argv[1], dict(case.files)["body"]
    try:
        options = options_of(body, more=answers.WORDS.get(path, frozenset()))
        found = answers.encoded(path, options).decode()
    except NapkinError as error:
        return Done(2, "", f"estimate: {' '.join(str(error).split())}\n")
    except KeyError as error:
        if error.args == (path,):  # the handler asks for known paths only
            return Done(2, "", f"estimate: there is no answer at {path!r}\n")
        return Done(DEFECT, "", "", signature(error))
    except Exception as error:
        return Done(DEFECT, "", "", signature(error))
    report = json.loads(found).get("report")
    return Done(0, json.dumps(report) if report else "", "")


DOOR = Door("requests", make, answered, is_command=False, seconds=SECONDS_TO_SEARCH)
