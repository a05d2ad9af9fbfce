"""What the relay alone costs: latency and CPU from one stream to a thousand, beside another gateway in the same run.

Arms: straight to a scripted backend (`direct`), through a forwarder of bytes (`floor`: what any process in between
costs), through `countersign serve` (`proxy`), and where asked for through LiteLLM (`litellm`). Bursts of all arms are
shuffled inside each round. No workers run: what verification costs is told by `countersign bench overhead`.
"""
