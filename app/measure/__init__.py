"""What is measured and how: the metrics' definitions, memory probes, Prometheus."""
