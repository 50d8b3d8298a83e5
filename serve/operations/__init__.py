"""What an operator sees and sets: metrics, logs, traces, keys, rates, the server's own timeouts."""
