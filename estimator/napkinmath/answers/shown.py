"""What an Estimate gives to be looked at; the report, which stands higher, makes it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class ShownComparison(Protocol):
        """What `compare` gives: shown by print and by notebooks, and as a DataFrame."""

        rows: tuple[tuple[str, str, str], ...]

        def to_pandas(self) -> Any:
            """A DataFrame with the columns `first` and `second`."""
            ...

    class ShownDrawing(Protocol):
        """What `plot` gives: shown by notebooks, and saved as .svg, .html or .png."""

        def save(self, path: str, *, force: bool = False) -> None:
            """Writes the picture."""
            ...
