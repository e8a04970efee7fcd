"""What a plan says: estimates, the choice, crossovers, and the published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.config.families import TransportKind
from fathom.core.errors import ConfigError
from fathom.core.ports.engine import ReceivesInto
from fathom.sync.plan.advice import advise
from fathom.sync.plan.crossover import (
    Point,
    delta_wins_below,
    largest_share,
    over_engine_ranks,
    over_nodes,
    p2p_wins_from,
)
from fathom.sync.plan.estimate import NAMES, Estimate, Impossible, Scenario, broadcast, estimates, p2p
from fathom.sync.plan.fabric import FABRICS, DeltaRates, Storage
from fathom.sync.plan.forecast import Taken, forecast
from fathom.sync.plan.layout import EngineLayout, Topology, TrainerLayout
from fathom.sync.plan.model_size import ModelSize, Served
from fathom.sync.plan.published import FITTED_CHAIN, FITTED_LAYOUT, check, fit, published_rows
from fathom.sync.plan.question import Question, Split, scenario_of

H100 = FABRICS["infiniband-h100"]


def one_host(engines: int = 1, **changes: object) -> Scenario:
    return scenario_of(Question(params=1e9, engines=engines, **changes))


def cluster(nodes: int = 4, **changes: object) -> Scenario:
    return scenario_of(
        Question(
            params=70e9,
            trainer_nodes=nodes,
            trainer=Split(tp=4),
            engine_nodes=nodes,
            engine=Split(tp=8),
            **changes,
        )
    )


def by_name(scenario: Scenario) -> dict[str, Estimate]:
    return {answer.transport: answer for answer in estimates(scenario) if isinstance(answer, Estimate)}


def test_every_transport_is_answered_for() -> None:
    assert {kind.value for kind in TransportKind} == set(NAMES)
    for scenario in (one_host(), cluster()):
        assert tuple(answer.transport for answer in estimates(scenario)) == NAMES


def test_shared_needs_one_host() -> None:
    (shared,) = [answer for answer in estimates(cluster()) if answer.transport == "shared"]
    assert isinstance(shared, Impossible)
    assert "8 of them" in shared.reason


def test_a_delta_of_float32_is_no_delta() -> None:
    (delta,) = [answer for answer in estimates(one_host(served=Served.FLOAT32)) if answer.transport == "delta"]
    assert isinstance(delta, Impossible)
    assert "use disk" in delta.reason


@settings(deadline=None)
@given(
    params=st.floats(1e8, 1e12),
    nodes=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
    factor=st.floats(1.1, 10),
)
def test_more_bytes_last_longer_and_faster_links_less(params: float, nodes: int, tp: int, factor: float) -> None:
    scenario = replace(cluster(nodes), model=ModelSize.of_params(params))
    scenario = replace(scenario, topology=replace(scenario.topology, engines=EngineLayout(gpus=8 * nodes, tp=tp, ep=1)))
    larger = replace(scenario, model=ModelSize.of_params(params * factor))
    faster = replace(
        scenario,
        fabric=replace(
            H100, collective_bytes_per_s=factor * 50e9, p2p_bytes_per_s=factor * 50e9, gather_bytes_per_s=factor * 50e9
        ),
    )
    for name, estimate in by_name(scenario).items():
        assert by_name(larger)[name].total_s > estimate.total_s > 0
        assert by_name(faster)[name].total_s <= estimate.total_s
    assert by_name(scenario)["p2p"].moved_bytes <= by_name(scenario)["broadcast"].moved_bytes * (1 + 1e-9)


def test_p2p_moves_each_rank_its_share_and_broadcast_everything() -> None:
    found, full = by_name(cluster()), 140e9
    assert found["broadcast"].moved_bytes == full * 32
    assert found["p2p"].moved_bytes == full / 8 * 32


def test_an_engine_written_over_stands_still_all_the_time() -> None:
    for name, estimate in by_name(cluster(live=True)).items():
        assert estimate.pause_s == estimate.total_s, name
    assert by_name(one_host())["shared"].pause_s < by_name(one_host())["shared"].total_s / 10


def test_stages_hide_the_gather_of_a_broadcast() -> None:
    one = cluster()
    trainer = TrainerLayout(gpus=32, tp=4, pp=2)
    two = replace(one, topology=replace(one.topology, trainer=trainer))
    assert broadcast(one).gather_s > 0
    assert broadcast(two).gather_s == 0
    assert broadcast(two).transfer_s == broadcast(one).transfer_s  # they take turns


def test_the_fastest_is_chosen_and_the_simpler_of_equals() -> None:
    advice = advise(cluster())
    best = min(advice.estimates, key=lambda estimate: estimate.total_s)
    assert advice.transport == best.transport
    assert advice.sentences[0].startswith(f"Use {best.transport}: ")
    # shared memory as slow as p2p: no difference worth another library
    slow = replace(one_host(), fabric=replace(FABRICS["loopback"], shared_bytes_per_s=8.5e9))
    assert advise(slow).transport == "shared"


def test_slow_storage_between_hosts_makes_a_delta_the_answer() -> None:
    """Where nothing but a slow line leads to the engines."""
    scenario = cluster(link_gbps=0.01, storage_mbps=50.0, delta_ratio=0.02)
    assert advise(scenario).transport == "delta"


@settings(deadline=None)
@given(
    ratio=st.floats(0.001, 0.9),
    encode=st.floats(10, 1e4),
    decode=st.floats(10, 1e4),
    engines=st.integers(1, 5),
    hosts=st.booleans(),
)
def test_delta_and_file_are_equal_at_the_crossover(
    ratio: float, encode: float, decode: float, engines: int, hosts: bool
) -> None:
    rates = DeltaRates(ratio=ratio, encode_bytes_per_s=encode * 1e6, decode_bytes_per_s=decode * 1e6)
    scenario = replace(cluster() if hosts else one_host(engines), delta=rates)
    crossing = delta_wins_below(scenario)
    at = replace(scenario, storage=Storage(bytes_per_s=crossing))
    assert by_name(at)["delta"].total_s == pytest.approx(by_name(at)["disk"].total_s)
    below = by_name(replace(scenario, storage=Storage(bytes_per_s=crossing / 2)))
    assert below["delta"].total_s < below["disk"].total_s


def test_p2p_is_ahead_from_where_it_stays_ahead() -> None:
    points = [Point(at=at, broadcast_s=1.0, p2p_s=p2p_s) for at, p2p_s in ((1, 0.9), (2, 2.0), (4, 0.8), (8, 0.5))]
    assert p2p_wins_from(points) == 4
    assert p2p_wins_from(points[:2]) is None
    assert p2p_wins_from([]) is None


def test_the_share_that_decides_on_one_stage_is_where_the_curves_cross() -> None:
    """Without a chain, p2p is ahead exactly for engines of more ranks than one over that share."""
    share = largest_share(H100)
    assert share is not None
    scenario = replace(cluster(), fabric=replace(H100, chain_s=0.0))
    for point in over_engine_ranks(scenario):
        if point.at <= scenario.topology.trainer.stage_ranks:
            assert (point.p2p_s < point.broadcast_s) is (1 / point.at < share)


def test_places_where_the_splits_do_not_fit_are_left_out() -> None:
    (row,) = [row for row in published_rows() if row.model.name == "GLM-5"]
    assert [point.at for point in over_nodes(row.scenario(H100), (1, 2, 16, 32))] == [16, 32]


def test_the_two_constants_are_those_that_two_figures_give() -> None:
    fitted = fit()
    assert H100.chain_s == pytest.approx(fitted.chain_s, rel=2e-3)
    assert H100.layout_bytes_per_s == pytest.approx(fitted.layout_bytes_per_s, rel=2e-3)


def test_published_figures_are_predicted_as_well_as_the_documentation_says() -> None:
    checked = {(row.model, row.transport): row for row in check()}
    assert len(checked) == 18
    fitted = [key for key, row in checked.items() if row.fitted]
    assert fitted == [(FITTED_LAYOUT, "p2p"), (FITTED_CHAIN, "broadcast")]
    assert all(abs(checked[key].error) < 2e-3 for key in fitted)
    assert all(abs(row.error) < 0.46 for row in checked.values())
    assert all(abs(row.error) < 0.29 for row in checked.values() if row.nodes > 1)
    assert all(
        abs(checked[model, kind].error) < 0.11 for model in ("GLM-5", "Kimi-K2") for kind in ("broadcast", "p2p")
    )


def test_the_faster_transport_is_the_right_one_in_every_row() -> None:
    for row in published_rows():
        scenario = row.scenario(H100)
        predicted = p2p(scenario).total_s + row.p2p_post_s < broadcast(scenario).total_s
        assert predicted is (row.p2p_s < row.broadcast_s), row.model.name


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Question(), "which model"),
        (Question(params=1e9, trainer_nodes=2), "Give --engine-nodes too"),
        (Question(params=1e9, engine_nodes=2), "Give --trainer-nodes too"),
        (Question(params=1e9, engine_nodes=0, trainer_nodes=1), "at least 1"),
        (Question(params=1e9, engines=2, engine_nodes=1, trainer_nodes=1), "give --engine-nodes only"),
        (Question(params=1e9, engines=0), "engine: gpus = 0"),
        (Question(params=1e9, fabric="infinband-h100"), "did you mean infiniband-h100"),
        (Question(params=1e9, trainer_nodes=1, engine_nodes=1, fabric="loopback"), "use --fabric ethernet-10g"),
        (Question(params=1e9, link_gbps=0), "e.g. 400"),
        (Question(params=1e9, storage_mbps=-3), "--storage-mbps"),
        (Question(params=1e9, learning_rate=0), "e.g. 1e-6"),
        (Question(params=1e9, learning_rate=float("nan")), "e.g. 1e-6"),
        (Question(params=1e9, weight_std=0), "--weight-std"),
        (Question(params=1e9, density=1.5), "--density 0 to 1"),
        (Question(params=1e9, delta_ratio=0), "--delta-ratio"),
        (Question(params=1e9, encode_mbps=0), "--encode-mbps 500"),
        (Question(params=1e9, gpus_per_node=4), "says nothing about one host"),
        (Question(params=1e9, trainer_nodes=1, engine_nodes=1, gpus_per_node=0), "at least 1"),
        (Question(params=1e9, learning_rate=1e-6, density=0.1), "said twice"),
        (Question(params=1e9, weight_std=0.1, delta_ratio=0.1), "said twice"),
    ],
)
def test_absurd_questions_are_refused_with_the_fix(question: Question, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scenario_of(question)


def test_a_published_row_is_a_question_of_its_own() -> None:
    scenario = scenario_of(Question(), published="Kimi-K2")
    assert (scenario.served, scenario.topology.engines.engines) == (Served.FP8, 8)
    assert scenario.receives_into is ReceivesInto.LIVE
    with pytest.raises(ConfigError, match="did you mean Kimi-K2"):
        scenario_of(Question(), published="Kimi-2")
    with pytest.raises(ConfigError, match="said twice"):
        scenario_of(Question(engine=Split(tp=2)), published="Kimi-K2")
    with pytest.raises(ConfigError, match="said twice"):
        scenario_of(Question(params=1e9), published="Kimi-K2")


def taken(size: float, receivers: int, phase: str, seconds: float, **more: object) -> Taken:
    return Taken(transport="shared", size_bytes=size, receivers=receivers, phase=phase, seconds=seconds, **more)


def test_forecasts_come_from_the_middle_size_alone() -> None:
    measured = [taken(size, n, "transfer", size * 2) for size in (1e7, 1e8, 1e9) for n in (1, 2, 4)]
    made = forecast(measured, cores=2)
    assert [row.taken for row in made] == measured
    assert [(row.taken.size_bytes, row.taken.receivers) for row in made if row.calibrated] == [(1e8, 1)]
    for row in made:
        expected = row.taken.size_bytes * 2 * (2 if row.taken.receivers == 4 else 1)  # four share two cores
        assert row.predicted_s == pytest.approx(expected)
    assert {round(row.error, 9) for row in made} == {0.0, 1.0}


def test_what_the_trainer_does_alone_does_not_depend_on_receivers() -> None:
    made = forecast([taken(1e8, n, "digest", 1.0) for n in (1, 4)], cores=2)
    assert [row.predicted_s for row in made] == [1.0, 1.0]


def test_receivers_take_turns_in_p2p_and_share_cores_with_the_source_of_a_broadcast() -> None:
    for transport, expected in (
        ("p2p by NIXL", [1.0, 2.0, 4.0]),
        ("broadcast", [1.0, 1.5, 2.5]),
        ("disk", [1.0, 1.0, 2.0]),
    ):
        measured = [replace(taken(1e8, n, "transfer", 1.0), transport=transport) for n in (1, 2, 4)]
        assert [row.predicted_s for row in forecast(measured, cores=2)] == expected


def test_over_a_link_nothing_is_calibrated() -> None:
    link = {"link_bytes_per_s": 1e7}
    rounds = {1: 1, 2: 2, 3: 2, 4: 3, 7: 3, 8: 4}  # of a tree
    broadcasts = [replace(taken(1e8, n, "transfer", 10.0, **link), transport="broadcast") for n in rounds]
    made = forecast([*broadcasts, taken(1e8, 4, "transfer", 10.0, **link)], cores=2)
    assert [(row.predicted_s, row.calibrated) for row in made] == [
        *((10.0 * sent, False) for sent in rounds.values()),
        (40.0, False),
    ]


def test_a_broadcast_passes_the_link_of_its_source_in_each_round_of_a_tree_and_once_in_a_chain() -> None:
    def seconds(engine_nodes: int, tree: bool) -> float:
        scenario = scenario_of(Question(params=1e9, trainer_nodes=1, engine_nodes=engine_nodes, gpus_per_node=1))
        fabric = replace(FABRICS["ethernet-10g"], broadcasts_in_tree=tree, chain_s=0.0)
        return by_name(replace(scenario, fabric=fabric))["broadcast"].transfer_s

    once = seconds(1, tree=True)
    assert [seconds(n, tree=True) for n in (2, 3, 4)] == pytest.approx([2 * once, 2 * once, 3 * once])
    assert [seconds(n, tree=False) for n in (1, 4)] == pytest.approx([once, once])


def test_topologies_count_hosts() -> None:
    layout = Topology(trainer=TrainerLayout(gpus=12), engines=EngineLayout(gpus=4), one_host=False)
    assert (layout.trainer_hosts, layout.engine_hosts, layout.hosts) == (2, 1, 3)
    assert replace(layout, one_host=True).hosts == 1
