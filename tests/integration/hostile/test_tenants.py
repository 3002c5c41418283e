"""Who administers a broker that runs as a user of its own: a number alone makes nobody an administrator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.brokers import started
from tests.integration.hostile.tenants import ALICE, BROKER, EVE, NEEDS, Unprivileged, become
from tests.namespaces import unshare
from tests.unit.server.visitor import Visitor, visiting

pytestmark = NEEDS

SETTINGS = "[sockets]\nmode = 0o666\n"

NO_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child")
OWN_USERS = ("unshare", "--user", "--map-root-user")


@pytest.fixture(scope="module")
def broker() -> Iterator[Unprivileged]:
    unshare("--user", "--map-root-user", "--pid", "--fork")
    with started(lambda directory: Unprivileged(directory, SETTINGS)) as process:
        yield process


@pytest.fixture(scope="module")
def alice(broker: Unprivileged) -> Iterator[Visitor]:
    """A user who has published a pool that is for nobody else."""
    with visiting(broker.directory, ALICE, ALICE) as visitor:
        assert visitor("publish", "secret", 0o600) == 1
        yield visitor


ADMINISTRATORS = [
    pytest.param(0, (), id="root"),
    pytest.param(BROKER, become(BROKER), id="the-brokers-user"),
]

IMPOSTORS = [
    pytest.param(0, NO_CAPABILITIES, id="root-without-capabilities"),
    pytest.param(0, OWN_PIDS, id="root-of-a-container"),
    pytest.param(0, (*OWN_PIDS, *NO_CAPABILITIES), id="root-of-a-container-without-capabilities"),
    pytest.param(0, OWN_USERS, id="root-of-a-user-namespace"),
    pytest.param(0, (*OWN_USERS, *OWN_PIDS[1:]), id="root-of-a-container-with-users-of-its-own"),
    pytest.param(BROKER, (*OWN_PIDS, *become(BROKER)), id="the-brokers-number-in-a-container"),
    pytest.param(EVE, (), id="another-user"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("uid", "before"), ADMINISTRATORS)
def test_those_who_run_the_host_or_the_broker_administer_it(
    broker: Unprivileged, alice: Visitor, uid: int, before: Sequence[str]
) -> None:
    with visiting(broker.directory, uid, uid, before=before) as visitor:
        assert visitor("attach", "secret") == [1, ALICE % 251]
        assert visitor("drain", True) is None
        assert alice.refused("attach", "secret")[0] == "unavailable"
        assert visitor("drain", False) is None
        assert alice("publish", "old", 0o600) == visitor("retire", "old")[1]


@pytest.mark.slow
@pytest.mark.parametrize(("uid", "before"), IMPOSTORS)
def test_a_number_alone_makes_no_administrator(
    broker: Unprivileged, alice: Visitor, uid: int, before: Sequence[str]
) -> None:
    with visiting(broker.directory, uid, uid, before=before) as visitor:
        assert visitor("pools") == []
        assert visitor.refused("attach", "secret")[0] == "denied"
        assert visitor.refused("retire", "secret")[0] == "denied"
        code, message = visitor.refused("drain", True)
        assert code == "denied"
        assert "admins" in message
    assert alice("attach", "secret") == [1, ALICE % 251]


@pytest.mark.slow
def test_root_administers_only_while_the_settings_trust_it_and_a_listed_user_wherever_it_is() -> None:
    settings = f"trust_root = false\nadmins = [{EVE}]\n{SETTINGS}"
    with (
        started(lambda directory: Unprivileged(directory, settings)) as broker,
        visiting(broker.directory, ALICE, ALICE) as owner,
        visiting(broker.directory, 0, 0) as root,
        visiting(broker.directory, EVE, EVE, before=(*OWN_PIDS, *become(EVE))) as listed,
    ):
        assert owner("publish", "secret", 0o600) == 1
        assert root.refused("attach", "secret")[0] == "denied"
        assert root.refused("drain", True)[0] == "denied"
        assert listed("attach", "secret") == [1, ALICE % 251]
