"""What Countersign adds to a request: time to the first token, gaps between tokens, total time, CPU.

The same streamed chat request goes straight to a backend (`direct`), through the proxy (`async`) and
through the proxy with the verdict in the stream (`inline`), interleaved at random inside rounds and timed
at the client's socket. The backend is a script: bytes prepared in advance, sent at exact times.
"""
