"""Whether anything is left over: tasks, connections, memory, keys without a time to live.

Clients come, misbehave and go for minutes, in front of a backend that fails in every way it can and a Redis that dies
now and then; one real proxy and one worker serve them. Then everybody leaves, and what is still there is counted.
"""
