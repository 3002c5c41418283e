"""Host devices do what every driver does."""

from tests.driver.conformance import *  # noqa: F403
from tests.driver.conformance_capture import *  # noqa: F403
from tests.driver.conformance_devices import *  # noqa: F403
from tests.driver.conformance_digest import *  # noqa: F403
from tests.driver.conformance_fabric import *  # noqa: F403
from tests.driver.conformance_multicast import *  # noqa: F403
from tests.driver.conformance_vmm import *  # noqa: F403
