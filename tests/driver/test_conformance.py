"""Host devices do what every driver does."""

from tests.driver.conformance import *  # noqa: F403
