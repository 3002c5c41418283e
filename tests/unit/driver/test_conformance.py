"""Host devices do what every driver does."""

from tests.unit.driver.conformance import *  # noqa: F403
from tests.unit.driver.conformance_capture import *  # noqa: F403
from tests.unit.driver.conformance_devices import *  # noqa: F403
from tests.unit.driver.conformance_fabric import *  # noqa: F403
from tests.unit.driver.conformance_kernels import *  # noqa: F403
from tests.unit.driver.conformance_multicast import *  # noqa: F403
from tests.unit.driver.conformance_vmm import *  # noqa: F403
