"""`estimate serve`: the report in a browser, on this machine only."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.cli.flag_rows import ON, TEXT
from napkinmath.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.serving.server import Server

DEFAULT_PORT = 8420
_FLAGS = (
    (
        ("--port", "-p"),
        TEXT,
        "N",
        f"port on the loopback interface; 0 takes a free one [{DEFAULT_PORT}]",
    ),
    (("--open",), ON, "", "open the page in the browser"),
)


def run(argv: Sequence[str]) -> int:
    """Serves until interrupted."""
    options = Parser(
        "estimate serve",
        "The report in a browser: sliders, timeline, formulas. Loopback only, offline.",
        (("page", _FLAGS),),
    ).parse(argv)
    import signal

    # Not at once: a service manager's end of the server is also its processes'.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = make_server(str(options.get("port", DEFAULT_PORT)))
    print(f"napkinmath is at {server.url}   (Ctrl-C ends it)", flush=True)
    if "open" in options:
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0


def make_server(port: str) -> Server:
    """The server on a port; InputError where that is no port, or taken."""
    from napkinmath.serving.server import Server

    if not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise InputError(f"--port {shown(port)} is not a port; use 0 (any free one) to 65535")
    try:
        return Server(int(port))
    except OSError as error:
        raise InputError(
            f"--port {port} cannot be used ({error.strerror}); use another one, or 0 for any that"
            " is free"
        ) from error
