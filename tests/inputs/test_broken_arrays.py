"""Arrays of shell scripts that the shell itself would refuse."""

from __future__ import annotations

from napkinmath.inputs.scripts.shell import commands


def test_a_redirection_in_an_array_ends() -> None:
    script = "ARGS=(\n  --lr %s>ro --batch 1\n  a < b\n)\npython train.py ${ARGS[@]}\n"
    words = [word.text for word in commands(script)[-1].words]
    assert words[:2] == ["python", "train.py"] and "--batch" in words
