"""Cannot be imported to the end: what ``test_worlds`` launches."""

from tests.hsdp.broken import wait_for_ever

wait_for_ever()
