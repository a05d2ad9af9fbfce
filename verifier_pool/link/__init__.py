"""What the proxy and the workers share: the queue and its scripts, what lies in Redis, how a process tells of itself.

The proxy imports this package of `verifier_pool` and no other; nothing here imports a worker, an engine or the proxy.
"""
