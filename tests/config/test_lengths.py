"""Lengths of sequences: read from files, thinned, and the padding of drawn batches."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.config.lengths import SAMPLE, padded_share, read_lengths, thinned
from napkinmath.inputs.options import train_config


def test_padding_is_what_drawn_batches_have() -> None:
    draw = random.Random(2)
    lengths = [draw.choice((40, 90, 300, 1500)) for _ in range(500)]
    for batch in (1, 2, 8):
        longest = [max(draw.choices(lengths, k=batch)) for _ in range(20_000)]
        drawn = 1 - sum(lengths) / len(lengths) / (sum(longest) / len(longest))
        assert padded_share(lengths, batch) == pytest.approx(drawn, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "512\n1024\n2048\n",
        "512, 1024, 2048",
        "[512, 1024, 2048]",
        '{"length": 512}\n{"length": 1024}\n{"length": 2048}\n',
    ],
)
def test_lengths_from_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    assert read_lengths(str(file)) == (512, 1024, 2048)
    done = run("--model", "gpt2", "--lengths", str(file), "--json")
    assert (
        done.code == 0
        and done.out == run("--model", "gpt2", "--lengths", "512,1024,2048", "--json").out
    )
    assert run("sweep", "--model", "gpt2", "--lengths", str(file), "--bs", "1,2").code == 0
    with pytest.raises(InputError):
        train_config(
            {"lengths": str(file)}
        )  # a path in options that came from elsewhere is not read


@pytest.mark.parametrize(
    "text", ["", "12,x", "0", "-4", "1.5", '{"len": 3}', '{"length": 3}\nnonsense']
)
def test_files_without_lengths_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(InputError, match="--lengths"):
        read_lengths(str(file))
    with pytest.raises(InputError, match="no-such-file"):
        read_lengths(str(tmp_path / "no-such-file"))


@pytest.mark.parametrize("content", [b"[21, \x8c12]", b"\xff\xfe1\x00", b"12\x8012"])
def test_files_that_are_no_text_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match="not text in UTF-8"):
        read_lengths(str(file))
    with pytest.raises(InputError, match="no path"):
        read_lengths(str(file) + "\0")


def test_a_long_sample_is_thinned_without_losing_its_ends() -> None:
    draw = random.Random(3)
    lengths = [int(draw.lognormvariate(6, 1)) + 1 for _ in range(100_000)]
    few = thinned(lengths)
    assert len(few) == SAMPLE and min(few) == min(lengths) and max(few) == max(lengths)
    assert sum(few) / len(few) == pytest.approx(sum(lengths) / len(lengths), rel=0.02)
    assert padded_share(few, 8) == pytest.approx(padded_share(lengths, 8), abs=0.01)
