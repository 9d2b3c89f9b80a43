"""The page's answers in a browser's own Python: what the server does for a request, without one.

Nothing here may need a process, a socket or numpy.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from napkinmath.base.errors import NapkinError
from napkinmath.serving import answers
from napkinmath.serving.requests import options_of
from napkinmath.serving.wording import for_the_page

ONLY_SERVED = "this part needs numpy, which the page in the browser lacks; use `estimate serve`"


def reply(path: str, body: str) -> tuple[int, str]:
    """The HTTP status that the server would give, and the answer as JSON; never raises."""
    try:
        return int(HTTPStatus.OK), _made(path, body)
    except NapkinError as error:
        return _refused(HTTPStatus.UNPROCESSABLE_ENTITY, for_the_page(str(error)))
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "numpy":
            return _defect(error)
        return _refused(HTTPStatus.NOT_IMPLEMENTED, ONLY_SERVED)
    except Exception as error:
        return _defect(error)


def _made(path: str, body: str) -> str:
    if path == "/api/catalogue":
        return json.dumps(answers.catalogue(), separators=(",", ":"), allow_nan=False)
    options = options_of(body.encode(), more=answers.WORDS.get(path, frozenset()))
    return answers.encoded(path, options).decode()


def _defect(error: Exception) -> tuple[int, str]:
    name = type(error).__name__
    return _refused(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"this configuration could not be priced ({name}); please report it",
    )


def _refused(status: HTTPStatus, message: str) -> tuple[int, str]:
    return int(status), json.dumps({"error": message})
