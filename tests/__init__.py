"""All tests. rq takes its key prefix when it is imported, and `verifier_pool` sets it, so that comes first."""

import verifier_pool  # noqa: F401
