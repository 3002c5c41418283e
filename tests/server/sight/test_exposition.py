"""Metrics as whoever scrapes reads them."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from cubroker.protocol.infos import NOBODY
from cubroker.protocol.messages import View
from cubroker.server.sight.exposition import Exposition, Standing
from cubroker.server.sight.meters import Meters
from cubroker.server.sight.names import HIDDEN, MAX_NAMES, OTHER
from tests.server.sight import scenes

Series = Mapping[tuple[str, ...], float]


def scrape(
    view: View,
    meters: Meters | None = None,
    standing: Standing | None = None,
    now: float = scenes.NOW,
    *,
    everything: bool = True,
) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the value of every series, by the metric's name and its labels' values, in order of the labels' names."""
    registry = (meters or Meters()).registry
    exposition = Exposition(registry, lambda: standing or Standing(), clock=lambda: now, everything=everything)
    series: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(exposition.text(view).decode()):
        for sample in family.samples:
            key = tuple(value for _, value in sorted(sample.labels.items()))
            assert key not in series.setdefault(sample.name, {})
            series[sample.name][key] = sample.value
    return series


def test_bytes_are_told_by_device_pool_state_and_owner() -> None:
    view = scenes.view(2, 5)
    found = scrape(view)["cubroker_pool_bytes"]
    for block in view.blocks:
        index = next(str(device.index) for device in view.devices if device.uuid == block.device)
        state = block.state if block.stage == "held" else "freeing"
        owner = HIDDEN if block.owner == NOBODY else str(block.owner)
        assert found[block.device, index, owner, block.pool or HIDDEN, state] == block.nbytes
    assert len(found) == len(view.blocks)


def test_devices_sessions_leases_and_waiting_requests_are_told() -> None:
    view = scenes.view(2, 5)
    found = scrape(view)
    for device in view.devices:
        key = (device.uuid, str(device.index))
        assert found["cubroker_device_total_bytes"][key] == device.total
        assert found["cubroker_device_budget_bytes"][key] == device.budget
        assert found["cubroker_device_allocated_bytes"][key] == device.allocated
        assert found["cubroker_device_promised_bytes"][key] == device.promised
    assert sum(found["cubroker_sessions"].values()) == len(view.clients)
    assert {key[0] for key in found["cubroker_sessions"]} == {"connected", "detached"}
    assert sum(found["cubroker_leases"].values()) == sum(pool.leases for pool in view.pools)
    assert found["cubroker_waiting_requests"] == {("attach",): 1, ("create",): 1, ("event",): 0}
    assert found["cubroker_longest_wait_seconds"] == {("attach",): 12, ("create",): 300, ("event",): 0}


def test_where_not_all_sessions_and_requests_are_seen_none_are_counted() -> None:
    found = scrape(scenes.view(2, 5), everything=False)
    assert found.keys() == {
        "cubroker_build_info",
        *(name for name in scrape(scenes.view(2, 5)) if name.startswith("cubroker_device_")),
        "cubroker_pool_bytes",
        "cubroker_leases",
    }
    assert found["cubroker_pool_bytes"] == scrape(scenes.view(2, 5))["cubroker_pool_bytes"]


def test_nobody_has_waited_less_than_no_time_when_the_clock_was_put_back() -> None:
    found = scrape(scenes.view(2, 5), now=scenes.NOW - 3600)
    assert found["cubroker_longest_wait_seconds"] == {("attach",): 0, ("create",): 0, ("event",): 0}


def test_whatever_users_name_there_are_only_so_many_series() -> None:
    view = scenes.view(1, 500)
    found = scrape(view)
    pools = {key[3] for key in found["cubroker_pool_bytes"]}
    assert len(pools - {HIDDEN, OTHER}) == MAX_NAMES
    assert OTHER in pools
    assert sum(found["cubroker_pool_bytes"].values()) == sum(block.nbytes for block in view.blocks)
    assert len(found["cubroker_leases"]) <= 5 * (MAX_NAMES + 2)


def test_requests_refusals_and_gateways_are_counted() -> None:
    meters = Meters()
    meters.answered("Attach", 0.0002)
    meters.answered("Attach", 2.0, "timeout")
    meters.answered("Create", 0.5, "never heard of")
    meters.turned_away("over_quota")
    meters.gateway_changed()
    found = scrape(scenes.view(1, 0), meters)
    assert found["cubroker_request_seconds_count"] == {("Attach",): 2, ("Create",): 1}
    assert found["cubroker_request_seconds_sum"]["Attach",] == 2.0002
    assert found["cubroker_request_seconds_bucket"]["0.0003", "Attach"] == 1
    assert found["cubroker_refusals_total"] == {("timeout", "Attach"): 1, ("other", "Create"): 1}
    assert found["cubroker_sessions_refused_total"] == {("over_quota",): 1}
    assert found["cubroker_gateway_restarts_total"] == {(): 1}
    assert found["process_open_fds"][()] > 0


def test_without_a_store_nothing_is_told_of_it() -> None:
    found = scrape(scenes.view(1, 0))
    assert "cubroker_store_descriptors" not in found
    assert found["cubroker_restarts_total"] == {(): 0}
    found = scrape(scenes.view(1, 0), standing=Standing(3, 17, 512))
    assert found["cubroker_store_descriptors"] == {(): 17}
    assert found["cubroker_store_descriptors_limit"] == {(): 512}
    assert found["cubroker_restarts_total"] == {(): 3}


def test_bytes_beyond_leases_are_told_by_user_and_only_so_many_users_are_named() -> None:
    assert "cubroker_mapped_beyond_leases_bytes" not in scrape(scenes.view(1, 0))
    stranger = scrape(scenes.view(1, 0), standing=Standing(beyond_leases={4001: 1}), everything=False)
    assert "cubroker_mapped_beyond_leases_bytes" not in stranger
    found = scrape(scenes.view(1, 0), standing=Standing(beyond_leases={4001: 64 << 20, 4002: 0}))
    assert found["cubroker_mapped_beyond_leases_bytes"] == {("4001",): 64 << 20, ("4002",): 0}
    found = scrape(scenes.view(1, 0), standing=Standing(beyond_leases=dict.fromkeys(range(5000, 6000), 1)))
    assert sum(found["cubroker_mapped_beyond_leases_bytes"].values()) == 1000
    assert len(found["cubroker_mapped_beyond_leases_bytes"]) <= MAX_NAMES + 1
