"""The catalog of links, and `estimate links`."""

from __future__ import annotations

import json
import pathlib

import pytest
from napkinmath.base.errors import InputError
from napkinmath.catalog.gpus import find_gpu, load_gpus
from napkinmath.catalog.links import (
    attained_on_gpu_link,
    default_network,
    find_network,
    load_networks,
    network_named,
)
from napkinmath.cli.main import main


@pytest.mark.parametrize("network", load_networks(), ids=lambda n: n.name)
def test_every_network_is_found_by_its_names_and_has_sources(network: object) -> None:
    row = find_network(network.name)  # type: ignore[attr-defined]
    assert all(find_network(alias).name == row.name for alias in row.aliases)
    assert 0 < row.attained.share <= 1 and 0 < row.attained.hop_s < 1e-3 and row.gbit_per_s > 0
    assert row.attained.sources and all(row.attained.sources)


@pytest.mark.parametrize("gpu", load_gpus(), ids=lambda g: g.name)
def test_every_gpu_has_a_usual_network_and_known_links(gpu: object) -> None:
    assert default_network(gpu).bytes_per_s > 0  # type: ignore[arg-type]
    link = gpu.gpu_link  # type: ignore[attr-defined]
    if link is not None:
        attained = attained_on_gpu_link(link.kind, link.generation)
        assert 0.5 < attained.share <= 1 and attained.sources


@pytest.mark.parametrize(
    ("text", "kind", "rate"),
    [
        ("400", "roce", 400),
        ("10", "ethernet", 10),
        ("ib-ndr", "ib-ndr", 400),
        ("NDR", "ib-ndr", 400),
        ("InfiniBand HDR", "ib-hdr", 200),
        ("roce:200", "roce", 200),
        ("4x ib-hdr", "ib-hdr", 100),
        ("efa", "efa-v2", 400),
    ],
)
def test_networks_are_named_the_ways_people_write_them(text: str, kind: str, rate: float) -> None:
    link = network_named(text, 8)
    assert (link.kind, link.gbit_per_s_per_gpu) == (kind, rate)


@pytest.mark.parametrize("text", ["", "carrier-pigeon", "roce:", "roce:-3", "0", "4x", "9xnothing"])
def test_networks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="network"):
        network_named(text, 8)


def test_generations_of_infiniband_get_faster() -> None:
    rates = [
        find_network("ib-" + name).gbit_per_s
        for name in ("sdr", "ddr", "qdr", "fdr", "edr", "hdr", "ndr", "xdr")
    ]
    assert rates == sorted(rates) and len(set(rates)) == len(rates)


def test_usual_networks_follow_the_generation() -> None:
    rates = [
        default_network(find_gpu(name)).gbit_per_s_per_gpu
        for name in ("RTX 4090", "V100-SXM2-32GB", "A100", "H100", "B300")
    ]
    assert rates == sorted(rates) and len(set(rates)) == len(rates)


def test_the_command_prints_times_and_where_they_come_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "links",
                "--gpus",
                "16xH100",
                "--network",
                "roce:200",
                "--from",
                "1MiB",
                "--to",
                "64MiB",
                "--json",
            ]
        )
        == 0
    )
    table = json.loads(capsys.readouterr().out)
    assert (table["ranks"], table["nodes"]) == (16, 2) and table["sources"]
    by_kind: dict[str, list[float]] = {}
    for message in table["messages"]:
        by_kind.setdefault(message["kind"], []).append(message["seconds"])
        assert message["bus_bytes_per_s"] < 600e9
    assert set(by_kind) == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
    assert all(times == sorted(times) for times in by_kind.values())


def test_the_command_draws(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "links.svg"
    assert main(["links", "--gpus", "2xRTX3090", "--plot", str(file)]) == 0
    drawn = file.read_text()
    assert (
        drawn.startswith("<svg")
        and drawn.count("<polyline") == 8
        and "2 ranks on 1 node of 2 x RTX 3090" in drawn
    )
    assert main(["links", "--gpus", "2xRTX3090", "--plot", str(file)]) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8"], "names no GPU"),
        (["--gpus", "1xH100"], "give 2 or more"),
        (["--gpus", "8xH100", "--ranks", "9"], "does not fit 8 GPUs"),
        (["--plot", "x.svg"], "add --gpus"),
        (["--gpus", "8xH100", "--collective", "gossip"], "use one of all-reduce"),
        (["--gpus", "8xH100", "--from", "2GiB", "--to", "1GiB"], "above --to"),
        (["--gpus", "8xH100", "--network", "400"], "add --nodes"),
        (["--gpus", "8xH100", "--plot", "x.bmp"], "use .svg or .png"),
        (["--gpus", "16xH100", "--network", "smoke"], "is unknown"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["links", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_without_gpus_the_networks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["links"]) == 0
    assert capsys.readouterr().out.count("\n") == 1 + len(load_networks())
