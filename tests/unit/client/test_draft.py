from __future__ import annotations

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid, NotFound
from cubroker.protocol.messages import Close
from tests.brokers import eventually
from tests.unit.client.conftest import LAYOUT, content, leases, publish

pytestmark = pytest.mark.usefixtures("share")


def test_every_device_gets_its_own_copy(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, devices=(1, 0)) as draft:
        assert [replica.device.index for replica in draft.replicas] == [1, 0]
        assert draft.device.index == 1
        for number, replica in enumerate(draft.replicas):
            replica["bias"].copy_from_bytes(bytes([number] * 16))
        assert draft.seal() == 1
    for number, device in enumerate((1, 0)):
        with client.attach(name, device=device) as pool:
            assert pool["bias"].tobytes() == bytes([number] * 16)


def test_memory_of_a_new_draft_is_zero(client: Broker, name: str) -> None:
    layout = Layout.pack([("all", "U8", (4 << 20,))])
    for _ in range(2):
        with client.create(name, layout) as draft:
            assert not any(draft["all"].tobytes())
            draft["all"].copy_from(b"\xff" * (4 << 20))


def test_leaving_without_a_seal_discards(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT) as draft:
        assert [info.state for info in client.pools() if info.name == name] == ["draft"]
    assert draft.closed
    eventually(lambda: not [info for info in client.pools() if info.name == name], "the end of the draft")


def test_an_exception_discards(client: Broker, name: str) -> None:
    draft = client.create(name, LAYOUT)
    tensor = draft["weight"]
    with pytest.raises(ZeroDivisionError), draft:
        raise ZeroDivisionError
    with pytest.raises(Invalid, match="given back"):
        tensor.tobytes()
    with pytest.raises(NotFound):
        client.attach(name)


def test_a_sealed_draft_and_its_tensors_are_of_no_use(client: Broker, name: str) -> None:
    draft = client.create(name, LAYOUT, devices=(0, 1))
    tensor, replica = draft["weight"], draft.replicas[1]
    assert draft.seal() == 1
    assert draft.closed
    assert draft.sealed
    for use in (lambda: tensor.copy_from_bytes(bytes(128)), lambda: tensor.pointer, tensor.numpy):
        with pytest.raises(Invalid, match=f"draft of pool {name!r} version 1 was given back"):
            use()
    for use in (lambda: draft["weight"], draft.seal, lambda: replica["weight"]):
        with pytest.raises(Invalid, match="is closed in this process"):
            use()
    draft.close()
    with client.attach(name, device=0) as pool:
        assert pool.version == 1


def test_a_seal_names_what_is_still_in_use_and_can_be_tried_again(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT) as draft:
        weight, bias = draft["weight"].numpy(), draft["bias"].numpy()
        with pytest.raises(Invalid, match="still in use: bias, weight; drop the arrays made from it, then seal"):
            draft.seal()
        weight.view("u1")[:] = bytearray_like(content("weight", 128), weight.view("u1").shape)
        del weight, bias
        assert draft.seal() == 1
    with client.attach(name) as pool:
        assert pool["weight"].tobytes() == content("weight", 128)


def bytearray_like(data: bytes, shape: tuple[int, ...]) -> object:
    import numpy as np

    return np.frombuffer(data, "u1").reshape(shape)


def test_a_seal_names_a_few_of_many(client: Broker, name: str) -> None:
    with client.create(name, Layout.pack([(f"t{i}", "U8", (1,)) for i in range(10)])) as draft:
        arrays = [tensor.numpy() for tensor in draft.values()]
        with pytest.raises(Invalid, match=r"in use: t0, t1, .*t7 and 2 more; drop"):
            draft.seal()
        arrays.clear()


def test_an_array_delays_a_discard_until_the_tensors_are_gone_too(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT) as draft:
        tensor = draft["weight"]
        array = tensor.numpy()
    array[:] = 1
    del array
    assert tensor.tobytes()[:4] != bytes(4)
    assert [info.state for info in client.pools() if info.name == name] == ["draft"]
    del tensor
    eventually(lambda: not [info for info in client.pools() if info.name == name], "the end of the draft")


def test_a_seal_that_the_broker_refuses_is_an_error(client: Broker, name: str) -> None:
    draft = client.create(name, LAYOUT)
    client.requests.submit(Close(draft.lease)).result(60)
    with pytest.raises(NotFound, match="lease"):
        draft.seal()
    assert leases(client, name) == 0


def test_a_pool_s_own_layout_can_be_passed_on(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool, client.create(name, pool.layout) as draft:
        for tensor in draft.values():
            tensor.copy_from_bytes(pool[tensor.name].tobytes())
        assert draft.seal() == 2
