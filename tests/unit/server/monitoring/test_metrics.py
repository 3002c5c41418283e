"""Metrics as whoever scrapes reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cubroker.protocol import fields as pools
from cubroker.protocol.errors import Invalid
from cubroker.protocol.messages import View
from cubroker.protocol.status import HIDDEN_ID, BlockInfo, ClientInfo, LeaseInfo, PoolInfo
from cubroker.server.monitoring.metrics import (
    HIDDEN,
    LINGER,
    MAX_NAMES,
    OTHER,
    BrokerCounters,
    LabelLimiter,
    MetricsWriter,
)
from cubroker.server.monitoring.observer import BrokerGauges
from tests.unit.server.monitoring import scenes

Series = Mapping[tuple[str, ...], float]


def scrape(
    view: View,
    counters: BrokerCounters | None = None,
    gauges: BrokerGauges | None = None,
    now: float = scenes.NOW,
    *,
    everything: bool = True,
) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the value of every series, by the metric's name and its labels' values, in order of the labels' names."""
    registry = (counters or BrokerCounters()).registry
    text = MetricsWriter(registry, everything=everything).text(view, gauges, now)
    series: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
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
        owner = HIDDEN if block.owner == HIDDEN_ID else str(block.owner)
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
    assert found["cubroker_waiting_requests"] == {("attach",): 1, ("create",): 1, ("event",): 0, ("lock",): 1}
    assert found["cubroker_longest_wait_seconds"] == {("attach",): 12, ("create",): 300, ("event",): 0, ("lock",): 7}


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
    assert found["cubroker_longest_wait_seconds"] == {("attach",): 0, ("create",): 0, ("event",): 0, ("lock",): 0}


def test_whatever_users_name_there_are_only_so_many_series() -> None:
    view = scenes.view(1, 500)
    found = scrape(view)
    pools = {key[3] for key in found["cubroker_pool_bytes"]}
    assert len(pools - {HIDDEN, OTHER}) == MAX_NAMES
    assert OTHER in pools
    assert sum(found["cubroker_pool_bytes"].values()) == sum(block.nbytes for block in view.blocks)
    assert len(found["cubroker_leases"]) <= 5 * (MAX_NAMES + 2)


def test_requests_refusals_and_gateways_are_counted() -> None:
    counters = BrokerCounters()
    counters.request_answered("Attach", 0.0002)
    counters.request_answered("Attach", 2.0, "timeout")
    counters.request_answered("Create", 0.5, "never heard of")
    counters.turned_away("over_quota")
    counters.gateway_changed()
    found = scrape(scenes.view(1, 0), counters)
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
    found = scrape(scenes.view(1, 0), gauges=BrokerGauges(3, 17, 512))
    assert found["cubroker_store_descriptors"] == {(): 17}
    assert found["cubroker_store_descriptors_limit"] == {(): 512}
    assert found["cubroker_restarts_total"] == {(): 3}


MINUTE = 60.0


def versions(*states: str, published: Sequence[float]) -> tuple[PoolInfo, ...]:
    """Versions 1, 2, … of one pool in these states, and when they were published."""
    (info, *_) = scenes.view(1, 1).pools
    numbered = enumerate(zip(states, published, strict=True), 1)
    return tuple(
        msgspec.structs.replace(info, name="a", version=number, state=state, published=then)
        for number, (state, then) in numbered
    )


def holding(pools: tuple[PoolInfo, ...], **since: float) -> View:
    """A view of these versions, of which each is held by a client since a time; ``v1`` is the first."""
    leases = [LeaseInfo("a", int(name[1:]), then) for name, then in since.items()]
    clients = tuple(ClientInfo(n, n, 0, "connected", (lease,)) for n, lease in enumerate(leases))
    view = scenes.view(1, 0)
    blocks = (BlockInfo(view.devices[0].uuid, "a", 1, "current", "held", 1, 0),)
    return msgspec.structs.replace(view, pools=pools, clients=clients, blocks=blocks)


def test_a_lease_is_old_since_its_version_was_superseded_as_far_as_that_is_known() -> None:
    now = scenes.NOW
    oldest = "cubroker_longest_old_lease_seconds"
    assert set(scrape(scenes.view(2, 5))[oldest]) == {(pool.name,) for pool in scenes.view(2, 5).pools}
    assert oldest not in scrape(scenes.view(2, 5), everything=False)
    pools = versions("superseded", "current", published=(now - 300 * MINUTE, now - 2 * MINUTE))
    assert scrape(holding(pools, v1=now - 200 * MINUTE, v2=now))[oldest] == {("a",): 2 * MINUTE}
    assert scrape(holding(pools, v1=now - MINUTE))[oldest] == {("a",): MINUTE}, "it was granted after that"
    assert scrape(holding(pools, v2=now - MINUTE))[oldest] == {("a",): 0}
    assert scrape(holding(pools, v1=now - MINUTE), now=now - 9 * MINUTE)[oldest] == {("a",): 0}, (
        "the clock was put back"
    )
    retired = versions("retired", published=(now - 300 * MINUTE,))
    assert scrape(holding(retired, v1=now - 200 * MINUTE))[oldest] == {("a",): 0}, "nothing says since when"


@pytest.mark.slow
def test_a_version_that_stays_is_old_for_longer_and_longer_whatever_is_published_meanwhile() -> None:
    writer, began = MetricsWriter(BrokerCounters().registry), scenes.NOW
    for number in range(2, 90):
        now = began + number * MINUTE
        states = ("superseded", *("ended",) * (number - 3), "superseded", "current")[-number:]
        every = versions(*states, published=[began + each * MINUTE for each in range(1, number + 1)])
        there = tuple(pool for pool in every if pool.state != "ended")
        leases = {"v1": began + MINUTE, f"v{number - 1}": now - MINUTE}
        text = writer.text(holding(there, **leases), None, now).decode()
        assert f'cubroker_longest_old_lease_seconds{{pool="a"}} {now - began - 2 * MINUTE}' in text
        only_followers = writer.text(holding(there, **{f"v{number - 1}": now - MINUTE}), None, now).decode()
        assert 'cubroker_longest_old_lease_seconds{pool="a"} 0.0' in only_followers


def test_it_is_told_for_how_long_devices_have_been_freeing() -> None:
    first, second = scenes.view(2, 0).devices
    found = scrape(scenes.view(2, 0), gauges=BrokerGauges(freeing={first.uuid: 700.0, "GPU-absent": 1.0}))
    assert found["cubroker_longest_free_seconds"] == {(first.uuid, "0"): 700, (second.uuid, "1"): 0}
    assert "cubroker_longest_free_seconds" not in scrape(scenes.view(2, 0), everything=False)


def test_bytes_beyond_leases_are_told_by_user_and_only_so_many_users_are_named() -> None:
    assert "cubroker_mapped_beyond_leases_bytes" not in scrape(scenes.view(1, 0))
    stranger = scrape(scenes.view(1, 0), gauges=BrokerGauges(beyond_leases={4001: 1}), everything=False)
    assert "cubroker_mapped_beyond_leases_bytes" not in stranger
    found = scrape(scenes.view(1, 0), gauges=BrokerGauges(beyond_leases={4001: 64 << 20, 4002: 0}))
    assert found["cubroker_mapped_beyond_leases_bytes"] == {("4001",): 64 << 20, ("4002",): 0}
    found = scrape(scenes.view(1, 0), gauges=BrokerGauges(beyond_leases=dict.fromkeys(range(5000, 6000), 1)))
    assert sum(found["cubroker_mapped_beyond_leases_bytes"].values()) == 1000
    assert len(found["cubroker_mapped_beyond_leases_bytes"]) <= MAX_NAMES + 1


# -- labels -----------------------------------------------------------------------------------------


def test_so_many_names_have_a_label_of_their_own_and_the_rest_has_one_together() -> None:
    names = LabelLimiter()
    names.update((f"pool-{number}" for number in range(MAX_NAMES + 50)), scenes.NOW)
    labels = {names.label(f"pool-{number}") for number in range(MAX_NAMES + 50)}
    assert len(labels) == MAX_NAMES + 1
    assert OTHER in labels


def test_a_name_keeps_its_label_whatever_comes_later() -> None:
    names = LabelLimiter()
    names.update(["llama"], scenes.NOW)
    names.update([*(f"pool-{number}" for number in range(MAX_NAMES)), "llama"], scenes.NOW)
    assert names.label("llama") == "llama"
    assert names.label(f"pool-{MAX_NAMES - 1}") == OTHER


def test_whoever_makes_up_new_names_all_the_time_gets_no_more_labels() -> None:
    now = scenes.NOW
    names = LabelLimiter()
    seen = set()
    for turn in range(20):
        names.update((f"pool-{turn}-{number}" for number in range(MAX_NAMES)), now)
        seen |= {names.label(f"pool-{turn}-{number}") for number in range(MAX_NAMES)}
        now += LINGER / 30
    assert seen == {OTHER, *(f"pool-0-{number}" for number in range(MAX_NAMES))}
    now += LINGER
    names.update(["late"], now)
    assert names.label("late") == "late"


@pytest.mark.parametrize("label", [OTHER, HIDDEN])
def test_no_pool_can_have_the_name_of_a_label_that_stands_for_several(label: str) -> None:
    with pytest.raises(Invalid):
        pools.check_pool_name(label)


def test_what_has_no_name_is_hidden() -> None:
    assert LabelLimiter().label("") == HIDDEN
