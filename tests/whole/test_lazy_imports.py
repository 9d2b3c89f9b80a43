"""An import stays within a function only where it saves start-up."""

from __future__ import annotations

import pytest
from lazy_imports import useless_imports


@pytest.mark.slow
def test_every_import_within_a_function_saves_a_cold_command_something() -> None:
    assert useless_imports() == []
