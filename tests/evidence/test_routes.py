"""What a ledger says of expert routes: summed up, audited, traced, shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from fathom.apps.cli.main import app
from fathom.core.records.step import RouteMetrics, RowOutcome
from fathom.core.records.trajectory import Trajectory
from fathom.evidence.contracts.audit import audit
from fathom.evidence.contracts.check import Check
from fathom.evidence.report.pooling import pool_routes
from fathom.evidence.report.summary import summarise
from fathom.evidence.trace import trace_step
from fathom.ledger.reader import LedgerReader
from synthetic.history import History, config
from synthetic.records import outcome, step

LAYERS = 3


def metrics(tokens: int, agreement: float, **entries: float | None) -> RouteMetrics:
    part = RouteMetrics(
        tokens=tokens,
        agreement=agreement,
        layer_agreement=(1.0, agreement, 0.9),
        overlap=0.95,
        forced_share=1.0,
        mixed_share=0.5,
        margin_mean=0.02,
        margin_p01=0.001,
        size_bytes=10 * tokens,
        seconds=0.25,
    )
    return msgspec.structs.replace(part, **entries)


def compared(record: Trajectory, *changes: int) -> RowOutcome:
    return msgspec.structs.replace(outcome(record), route_changes=np.array(changes, np.int16))


def write(folder: Path, *, routed: bool = True, changes: tuple[int, ...] | None = (0, 2, 1)) -> None:
    """A run that asked for routes. In its second step versions changed from the second token of each row on."""
    settings = config()
    rollout = settings.rollout.model_copy(update={"record_routes": True})
    history = History(folder / "ledger")
    history.open(settings.model_copy(update={"rollout": rollout}))
    history.publish(0)
    history.routed = True
    first = history.group(0)
    history.train(1, first, rows=tuple(compared(record, 0, 0, 0, 0) for record in first))
    history.publish(1)
    history.routed = routed
    records = history.group(1, versions=(0, 1, 1), kv_versions=(0, 1, 1))
    rows = tuple(compared(record, *changes) if changes else outcome(record) for record in records)
    taken = step(2, rows, ages={(1, 1): 2, (0, 0): 4})
    history.writer.append_step(msgspec.structs.replace(taken, routes=metrics(12, 0.75)), rows)
    history.settle(records, 2)
    history.writer.commit()
    history.writer.close()


def test_pooled_by_tokens() -> None:
    pooled = pool_routes([metrics(30, 0.5), metrics(10, 0.9), metrics(0, 0.0)])
    assert pooled is not None
    assert pooled.tokens == 40
    assert pooled.agreement == pytest.approx(0.6)
    assert pooled.layer_agreement == pytest.approx((1.0, 0.6, 0.9))
    assert (pooled.size_bytes, pooled.seconds) == (400, 0.5)
    assert pool_routes([metrics(5, 1.0, margin_mean=None), metrics(5, 1.0)]).margin_mean is None  # pyright: ignore
    assert pool_routes([metrics(0, 0.0)]) is None


def test_a_summary_has_the_routes_of_all_steps(tmp_path: Path) -> None:
    write(tmp_path)
    with LedgerReader(tmp_path / "ledger") as reader:
        routes = summarise(reader).routes
    assert routes is not None
    assert (routes.tokens, routes.agreement, routes.overlap) == (12, 0.75, pytest.approx(0.95))


def test_a_trace_counts_layers_and_marks_tokens_after_several_versions(tmp_path: Path) -> None:
    write(tmp_path, routed=True)
    with LedgerReader(tmp_path / "ledger") as reader:
        first = trace_step(reader, 2)[0]
    assert first.route_layers == LAYERS
    assert [token.route_changes for token in first.tokens] == [0, 2, 1]
    # The second token's KV was computed again, its routes were not recorded again.
    assert [token.mixed_routes for token in first.tokens] == [False, True, True]


def test_a_trace_without_routes_says_so(tmp_path: Path) -> None:
    write(tmp_path, routed=False, changes=None)
    with LedgerReader(tmp_path / "ledger") as reader:
        first = trace_step(reader, 2)[0]
    assert first.route_layers is None
    assert {(token.route_changes, token.mixed_routes) for token in first.tokens} == {(None, None)}


def test_an_audit_passes_complete_routes(tmp_path: Path) -> None:
    check = routing_check(tmp_path)
    assert (check.examined, check.failures) == (14, 0)


@pytest.mark.parametrize(("routed", "changes"), [(False, (0, 2, 1)), (True, None)])
def test_an_audit_misses_routes_that_were_asked_for(
    tmp_path: Path, routed: bool, changes: tuple[int, ...] | None
) -> None:
    check = routing_check(tmp_path, routed=routed, changes=changes)
    assert (check.examined, check.failures) == (14, 2)
    assert "3 tokens without expert routes" in check.examples[0]


def routing_check(folder: Path, *, routed: bool = True, changes: tuple[int, ...] | None = (0, 2, 1)) -> Check:
    write(folder, routed=routed, changes=changes)
    with LedgerReader(folder / "ledger") as reader:
        (check,) = [check for check in audit(reader).checks if check.name == "routing"]
    return check


def test_people_see_them(tmp_path: Path) -> None:
    write(tmp_path / "moe-20250101-120000")
    (tmp_path / "moe-20250101-120000" / "config.json").write_text(config().model_dump_json(exclude_unset=True))
    shown = CliRunner().invoke(app, ["show", "moe", "--runs-dir", str(tmp_path)], env={"COLUMNS": "160"}).output
    assert "12 compared, 25.00% differ in some layer" in shown
    assert "25.00% in the worst (2 of 3)" in shown
    arguments = ["trace", "moe", "--runs-dir", str(tmp_path), "--step", "2"]
    traced = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"}).output
    assert "3/3" in traced
    assert "1/3 mixed" in traced
