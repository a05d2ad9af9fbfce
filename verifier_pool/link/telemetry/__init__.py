"""What a process tells its operator: log lines and spans, never content. The proxy and the workers share it."""
